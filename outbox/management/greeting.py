"""What a resident command says when it begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.management.base import BaseCommand


def greet(command: BaseCommand, options: Mapping[str, Any], text: str) -> None:
    """Print what the command serves, at once; not beside JSON, and not with `--verbosity 0`."""
    if not options.get("json") and options["verbosity"]:
        command.stdout.write(text)
        command.stdout.flush()

"""The first line that a long-running command prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.management.base import BaseCommand


def greet(command: BaseCommand, options: Mapping[str, Any], text: str) -> None:
    """Print and flush a line, except with `--json` or `--verbosity 0`."""
    if not options.get("json") and options["verbosity"]:
        command.stdout.write(text)
        command.stdout.flush()

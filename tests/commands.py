"""Commands of `manage.py`, run in the process of the test."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command


def exit_code(command: str, *arguments: object, **options: Any) -> Any:
    """Run a command; return its exit code."""
    try:
        call_command(command, *map(str, arguments), **options)
    except SystemExit as end:
        return end.code
    return 0


def run(command: str, *arguments: object) -> tuple[str, Any]:
    """Run a command; return what it printed, and its exit code."""
    out = StringIO()
    code = exit_code(command, *arguments, stdout=out)
    return out.getvalue(), code


@contextmanager
def refused(match: str = "") -> Iterator[None]:
    """A command that is run here ends with 2, and with this text."""
    with pytest.raises(CommandError, match=match or None) as error:
        yield
    assert error.value.returncode == 2

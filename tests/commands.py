"""Commands of `manage.py`, run in the process of the test."""

from io import StringIO
from typing import Any

from django.core.management import call_command


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

"""The end of a job that met what nobody foresaw: Python's own exit code for that, 1, would be an answer."""

from __future__ import annotations

import traceback


def describe(error: Exception) -> str:
    """Leave the traceback on standard error; return the error in one line."""
    traceback.print_exception(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

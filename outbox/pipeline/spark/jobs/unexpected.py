"""Report unexpected errors of a job. Its main() must catch them, because Python's exit code for them, 1, means findings."""

from __future__ import annotations

import traceback


def describe(error: Exception) -> str:
    """Print the traceback to standard error, and return the error in one line."""
    traceback.print_exception(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

"""Confirmation of acts that cannot be undone."""

from __future__ import annotations

import sys

from outbox.management.exits import unable


def confirm(warning: str) -> None:
    """
    Print a warning, and return if the user types "yes".

    Raises:
        CommandError: there is no terminal, or the user typed something else.
    """
    sys.stderr.write(f"{warning}\n")
    if not sys.stdin.isatty():
        raise unable("Nothing was done: there is no terminal for the confirmation. In scripts, use --no-input.")
    if input("Type 'yes' to continue: ") != "yes":
        raise unable("Nothing was done.")

"""Asking before what cannot be taken back."""

from __future__ import annotations

import sys

from outbox.management.exits import unable


def confirm(warning: str) -> None:
    """
    Print what is about to be done, and go on after "yes" only.

    Raises:
        CommandError: there is no terminal to ask on, or the answer was another one.
    """
    sys.stderr.write(f"{warning}\n")
    if not sys.stdin.isatty():
        raise unable("Nothing was done: there is no terminal to ask on. Scripts give --no-input.")
    if input("Type 'yes' to continue: ") != "yes":
        raise unable("Nothing was done.")

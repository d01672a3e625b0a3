"""Manual acts: the name of the operator, for the records, and the confirmation of an act that cannot be undone."""

from __future__ import annotations

import os
import pwd
import socket
import sys

from outbox.management.exits import unable


def actor(command: str) -> str:
    """Return the name of a command with the operating system's user and host: outbox_pause by ada@host."""
    number = os.getuid()
    try:
        name = pwd.getpwuid(number).pw_name
    except KeyError:  # a container may run with a user id that has no name
        name = str(number)
    return f"{command} by {name}@{socket.gethostname()}"


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

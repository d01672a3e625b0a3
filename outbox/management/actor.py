"""Who runs a command, for the traces of what is done by hand."""

from __future__ import annotations

import getpass
import os
import socket


def actor(command: str) -> str:
    """Return the name of a command with the system's user and host."""
    return f"{command} by {somebody()}"


def somebody() -> str:
    """Return the system's user and host: `ada@shop-1`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"

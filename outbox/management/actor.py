"""Who runs a command, for the traces of what is done by hand."""

from __future__ import annotations

import os
import pwd
import socket


def actor(command: str) -> str:
    """Return the name of a command with the system's user and host."""
    number = os.getuid()
    try:
        name = pwd.getpwuid(number).pw_name
    except KeyError:  # a container may run as a number that has no name
        name = str(number)
    return f"{command} by {name}@{socket.gethostname()}"

"""The user who runs a command, for records of manual acts."""

from __future__ import annotations

import os
import pwd
import socket


def actor(command: str) -> str:
    """Return the name of a command with the operating system's user and host."""
    number = os.getuid()
    try:
        name = pwd.getpwuid(number).pw_name
    except KeyError:  # a container may run with a user id that has no name
        name = str(number)
    return f"{command} by {name}@{socket.gethostname()}"

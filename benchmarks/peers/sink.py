"""A stand-in for the broker: each message that a relay sends becomes a line with its order's number and the time."""

from __future__ import annotations

import os
import time

FILE = "PEERS_SINK"

_file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if FILE in os.environ else None


def take(*numbers: object) -> None:
    """Accept messages; those of one call are written together."""
    if _file is not None:
        now = time.time()
        os.write(_file, "".join(f"{number} {now}\n" for number in numbers).encode())

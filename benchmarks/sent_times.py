"""The times of sends to a broker, recorded in one process and read in another."""

from __future__ import annotations

import json
import time
from pathlib import Path


class SentTimes:
    """The first time of each message, in seconds of the clock that all processes share. Written at the end."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def note(self, name: str) -> None:
        """Record the current time for a message."""
        self._times.setdefault(name, time.time())

    def write(self, path: Path) -> None:
        """Append the recorded times to a file."""
        path.write_text(json.dumps(read(path) | self._times))


def read(path: Path) -> dict[str, float]:
    """Return the recorded times, none if the file does not exist."""
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found

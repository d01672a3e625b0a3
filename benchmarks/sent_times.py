"""When messages were handed to a broker, noted in one process and read in another."""

from __future__ import annotations

import json
import time
from pathlib import Path


class SentTimes:
    """The first time of each message, in seconds of the clock that all processes share. Written when all is over."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def note(self, name: str) -> None:
        """Note that a message is handed over now."""
        self._times.setdefault(name, time.time())

    def write(self, path: Path) -> None:
        """Write what was noted to a file, beside what was written before."""
        path.write_text(json.dumps(read(path) | self._times))


def read(path: Path) -> dict[str, float]:
    """Return what was written; nothing where nobody has written yet."""
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found

"""
One message in doubt at a time: a process runs only one message that may have killed a process, whatever its threads.

If it kills this process, too, no other such message is interrupted. Otherwise messages that were interrupted together would come
back together, and be interrupted again.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

EXCLUDES_SECONDS = 60.0  # a run that takes longer is slow or stuck, and no longer keeps others waiting
BEYOND_LIMIT_SECONDS = 10.0

_lock = threading.Lock()


class Doubt:
    """A reservation of this process's only run in doubt. `is_mine`: whether no other thread has it."""

    def __init__(self) -> None:
        global _reserved
        self.until: float = time.monotonic() + EXCLUDES_SECONDS
        with _lock:
            self.is_mine = _reserved is None or time.monotonic() >= _reserved.until
            if self.is_mine:
                _reserved = self

    def extend(self, time_limit: timedelta | None) -> None:
        """Keep the reservation as long as a handler with a time limit may run."""
        if time_limit is not None:
            seconds = time_limit.total_seconds() + BEYOND_LIMIT_SECONDS
            self.until = time.monotonic() + max(EXCLUDES_SECONDS, seconds)

    def end(self) -> None:
        """Leave it to another thread."""
        global _reserved
        with _lock:
            if _reserved is self:
                _reserved = None


_reserved: Doubt | None = None

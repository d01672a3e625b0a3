"""
Only one message in doubt at a time: a message that may have killed a process is run by one thread of this process at a time.

If it kills this process, too, it interrupts no other message in doubt. Otherwise messages that were interrupted together would be
run again together, and would be interrupted again, although only one of them kills processes.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

RESERVED_SECONDS = 60.0  # a run that takes longer is slow or stuck, and keeps no other messages in doubt waiting
BEYOND_LIMIT_SECONDS = 10.0  # after its time limit, the handler or the process ends within this time

_lock = threading.Lock()


class Doubt:
    """
    A reservation of the only run of a message in doubt in this process.

    `is_granted`: whether this thread has it, and no other one.
    """

    def __init__(self) -> None:
        global _reserved
        self.until: float = time.monotonic() + RESERVED_SECONDS
        with _lock:
            self.is_granted = _reserved is None or time.monotonic() >= _reserved.until
            if self.is_granted:
                _reserved = self

    def extend(self, time_limit: timedelta | None) -> None:
        """Keep the reservation as long as a handler with a time limit may run."""
        if time_limit is not None:
            seconds = time_limit.total_seconds() + BEYOND_LIMIT_SECONDS
            self.until = time.monotonic() + max(RESERVED_SECONDS, seconds)

    def end(self) -> None:
        """Release the reservation, so that another thread may have it."""
        global _reserved
        with _lock:
            if _reserved is self:
                _reserved = None


_reserved: Doubt | None = None

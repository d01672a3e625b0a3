"""
A message is in doubt if it may have killed a process. Only one message in doubt is run by this process at a time.

So if this message kills the process, no other message in doubt is interrupted. Otherwise messages that were interrupted together
would be run again together, and would be interrupted again, although only one of them kills processes.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

RESERVED_SECONDS = 60.0  # a run that takes longer is slow or stuck, and other messages in doubt no longer wait for it
BEYOND_LIMIT_SECONDS = 10.0  # within this time after its time limit, a handler ends, or the lease thread gives it up

_lock = threading.Lock()


class Doubt:
    """
    A request for permission to run a message in doubt, which this process grants to one thread at a time.

    `is_granted`: whether the permission was granted. `until`: when it ends, even if `end` was not called.
    """

    def __init__(self) -> None:
        global _reserved
        self.until: float = time.monotonic() + RESERVED_SECONDS
        with _lock:
            self.is_granted = _reserved is None or time.monotonic() >= _reserved.until
            if self.is_granted:
                _reserved = self

    def extend(self, time_limit: timedelta | None) -> None:
        """Keep the permission for as long as a handler with this time limit may run; None keeps it for RESERVED_SECONDS."""
        if time_limit is not None:
            seconds = time_limit.total_seconds() + BEYOND_LIMIT_SECONDS
            self.until = time.monotonic() + max(RESERVED_SECONDS, seconds)

    def end(self) -> None:
        """Return the permission, if it was granted, so that another thread can get it."""
        global _reserved
        with _lock:
            if _reserved is self:
                _reserved = None


_reserved: Doubt | None = None

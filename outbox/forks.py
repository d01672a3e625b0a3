"""A lock that works in forked processes, such as Celery's and Gunicorn's workers."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """
    A lock that is free in a forked child, even if a thread of the parent held it. (That thread does not exist in the child.)

    Read `current` at each use, `with lock.current:`, because a fork replaces it.
    """

    def __init__(self) -> None:
        self.current = threading.Lock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.current = threading.Lock()

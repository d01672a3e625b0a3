"""A lock that works in a process that was forked, as Celery's and Gunicorn's workers are."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """
    A lock that a forked child finds free: another thread of its parent may have held it, and is not in the child.

    Ask for it each time: `with lock.current:`.
    """

    def __init__(self) -> None:
        self.current = threading.Lock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.current = threading.Lock()

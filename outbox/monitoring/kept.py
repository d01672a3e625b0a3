"""An answer that is kept for a while: for what anybody may ask, however often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from django.core.signals import setting_changed

from outbox.forks import ForkSafeLock

T = TypeVar("T")


class Kept(Generic[T]):
    """
    Keeps what a function returns, in this process. Of many threads that ask at once, one reads; the others get the last answer
    meanwhile, or wait for the first.

    What the function raises is raised to the one who read, and not kept. Changed settings end what is kept.

    Args:
        seconds: how long an answer is kept, from when it was read.
        clock: returns seconds that never go back.
    """

    def __init__(self, read: Callable[[], T], *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._kept: tuple[float, T] | None = None  # until when, and what
        self._lock = ForkSafeLock()
        setting_changed.connect(self._on_setting_changed)

    def __call__(self) -> T:
        """Return the answer: the kept one, or a new one."""
        kept = self._kept
        if kept is not None and kept[0] > self._clock():
            return kept[1]
        lock = self._lock.current
        if not lock.acquire(blocking=kept is None) and kept is not None:
            return kept[1]
        try:
            if self._kept is None or self._kept[0] <= self._clock():
                answer = self._read()
                self._kept = self._clock() + self._seconds, answer
                return answer
            return self._kept[1]
        finally:
            lock.release()

    def forget(self) -> None:
        """Read again at the next call."""
        self._kept = None

    def _on_setting_changed(self, **kwargs: object) -> None:
        self.forget()

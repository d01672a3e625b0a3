"""A function's result, cached for a short time, for requests without authentication."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from django.core.signals import setting_changed

from outbox.forks import ForkSafeLock

T = TypeVar("T")


class Cached(Generic[T]):
    """
    Caches the result of a function in this process.

    Of concurrent threads, only one calls the function. Meanwhile the others get the last result; if there is none yet, they wait.
    An exception is raised in the thread that called the function, and is not cached. Changed settings clear the cache.

    Args:
        read: the function.
        seconds: how long a result is cached.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, read: Callable[[], T], *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._cached: tuple[float, T] | None = None  # the time until which the result is valid, and the result
        self._lock = ForkSafeLock()
        setting_changed.connect(self._on_setting_changed)

    def __call__(self) -> T:
        """Return the cached result, or a new one."""
        cached = self._cached
        if cached is not None and cached[0] > self._clock():
            return cached[1]
        lock = self._lock.current  # another thread may hold it while it calls the function
        if not lock.acquire(blocking=cached is None) and cached is not None:
            return cached[1]
        try:
            if self._cached is None or self._cached[0] <= self._clock():
                result = self._read()
                self._cached = self._clock() + self._seconds, result
                return result
            return self._cached[1]
        finally:
            lock.release()

    def clear(self) -> None:
        """Clear the cache."""
        self._cached = None

    def _on_setting_changed(self, **kwargs: object) -> None:
        self.clear()

"""Shares one call among concurrent callers, as Go's package `singleflight` does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """The calls in progress, by key. Use it only in one event loop."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[T]] = {}

    async def join(self, key: Hashable, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the running call with this key, or of a new one. The call continues if a caller is cancelled."""
        if key not in self._running:
            self._running[key] = asyncio.ensure_future(call())
            self._running[key].add_done_callback(lambda done: self._finish(key, done))
        return await asyncio.shield(self._running[key])

    def _finish(self, key: Hashable, done: asyncio.Future[T]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # mark it as retrieved: asyncio warns otherwise if every caller was cancelled

"""One attempt for all who want the same at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedAttempts(Generic[T]):
    """Attempts under way, by what they are for. In one loop only."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, asyncio.Future[T]] = {}

    async def join(self, key: Hashable, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what an attempt brings: of that which is under way, or of a new one. It goes on though who began it leaves."""
        if key not in self._under_way:
            self._under_way[key] = asyncio.ensure_future(attempt())
            self._under_way[key].add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(self._under_way[key])

    def _end(self, key: Hashable, done: asyncio.Future[T]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # whoever waited has it; where nobody did any more, asyncio shall not complain

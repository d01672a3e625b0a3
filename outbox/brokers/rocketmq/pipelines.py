"""Concurrent requests, with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")


async def pipelined(items: Sequence[I], act: Callable[[I], Awaitable[R]], *, at_once: int) -> list[R]:
    """Call a function for all items, at most `at_once` at the same time. Return the results in order."""
    results: dict[int, R] = {}
    waiting = iter(enumerate(items))

    async def work() -> None:
        for place, item in waiting:
            results[place] = await act(item)

    await asyncio.gather(*[work() for _ in range(min(at_once, len(items)))])
    return [results[place] for place in range(len(items))]

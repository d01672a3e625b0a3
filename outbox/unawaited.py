"""Find calls of `apublish()` that are not awaited, because they would leave business rows without their message."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from outbox.errors import NotAwaited

# The calls within the innermost block of `awaiting_all`; None outside of such blocks.
_calls: ContextVar[list[Coroutine[Any, Any, Any]] | None] = ContextVar("outbox_calls_to_await", default=None)


def record(call: Coroutine[Any, Any, Any]) -> None:
    """Record a call that has to end before the innermost block of `awaiting_all` ends."""
    if (calls := _calls.get()) is not None:
        calls.append(call)


@contextmanager
def awaiting_all() -> Iterator[None]:
    """
    Run a block in which all calls of `apublish()` must end.

    Raises:
        NotAwaited: a call was not awaited, or still runs in a task.
    """
    calls: list[Coroutine[Any, Any, Any]] = []
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)
    unfinished = [call for call in calls if inspect.getcoroutinestate(call) != inspect.CORO_CLOSED]
    for call in unfinished:
        if inspect.getcoroutinestate(call) == inspect.CORO_CREATED:
            call.close()
    if unfinished:
        times = "once" if len(unfinished) == 1 else f"{len(unfinished)} times"
        raise NotAwaited(
            f"apublish() was called {times} and not awaited before the end of the transaction. The transaction is rolled back, "
            "because its messages would be missing.",
            hint="Write `await apublish(...)`, and await tasks that call it.",
        )

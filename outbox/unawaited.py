"""Calls of `apublish()` that nobody awaits: they would leave rows without their message."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from outbox.errors import NotAwaited

_calls: ContextVar[list[Coroutine[Any, Any, Any]] | None] = ContextVar("outbox_calls_to_await", default=None)


def note(call: Coroutine[Any, Any, Any]) -> None:
    """Note a call that has to end before the innermost block of `awaiting_all` does."""
    if (calls := _calls.get()) is not None:
        calls.append(call)


@contextmanager
def awaiting_all() -> Iterator[None]:
    """
    Run a block whose calls of `apublish()` must have ended when it returns.

    Raises:
        NotAwaited: one was not awaited, or is still under way in a task.
    """
    calls: list[Coroutine[Any, Any, Any]] = []
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)
    left = [call for call in calls if inspect.getcoroutinestate(call) != inspect.CORO_CLOSED]
    for call in left:
        if inspect.getcoroutinestate(call) == inspect.CORO_CREATED:
            call.close()
    if left:
        times = "once" if len(left) == 1 else f"{len(left)} times"
        raise NotAwaited(
            f"apublish() was called {times} and not awaited before the end of the transaction, which is rolled back: its "
            "messages would be missing.",
            hint="Write `await apublish(...)`, and await tasks that call it.",
        )

"""Handlers that are coroutine functions, run by the worker's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

from asgiref.sync import async_to_sync

from outbox.errors import TimeLimitExceeded

CANCEL_SECONDS = 5.0


def driven(handler: Callable[[Any, Any], Any], limit: timedelta | None) -> Callable[[Any, Any], object]:
    """Return a plain function that runs a coroutine function, and cancels it at its time limit."""

    async def run(message: Any, context: Any) -> object:
        try:
            async with asyncio.timeout(None if limit is None else limit.total_seconds()) as timeout:
                return await handler(message, context)
        except TimeoutError as error:
            if timeout.expired():
                raise TimeLimitExceeded from error
            raise

    def drive(message: Any, context: Any) -> object:
        running = _Running()
        try:
            return async_to_sync(running.run)(run(message, context))
        except BaseException:
            running.cancel()  # where only this thread's wait was interrupted
            raise

    return drive


class _Running:
    """A coroutine that runs in the event loop of another thread."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._is_over = threading.Event()

    async def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        self._task = asyncio.current_task()
        try:
            return await coroutine
        finally:
            self._is_over.set()

    def cancel(self) -> None:
        """Cancel the coroutine if it has not ended, and wait a moment for its end."""
        if self._task is not None and not self._is_over.is_set():
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
            self._is_over.wait(CANCEL_SECONDS)

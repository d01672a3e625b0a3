"""Sessions that wait for Spark: they say now and then that they are there, or the server ends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outbox.database.locks import IDLE_SESSION_SECONDS

if TYPE_CHECKING:
    import psycopg

EVERY_SECONDS = IDLE_SESSION_SECONDS / 5


@contextmanager
def kept_alive(connection: psycopg.Connection[Any], *, every: float = EVERY_SECONDS) -> Iterator[None]:
    """
    Keep a session from being idle for long, by a thread. A process that stands still has no thread that runs.

    Args:
        every: seconds between two signs of life.
    """
    import psycopg  # a cluster that reads files only does without

    ended = threading.Event()

    def say() -> None:
        while not ended.wait(every):
            try:
                connection.execute("SELECT 1")
            except psycopg.Error:  # in a failed transaction it is a sign of life all the same
                if connection.closed:
                    return

    thread = threading.Thread(target=say, name="outbox keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

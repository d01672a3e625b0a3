"""Keep idle database sessions alive while Spark works; the server would end them otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from outbox.database.locks import IDLE_SESSION_SECONDS

EVERY_SECONDS = IDLE_SESSION_SECONDS / 5


@contextmanager
def keep_alive(connection: psycopg.Connection[Any], *, every: float = EVERY_SECONDS) -> Iterator[None]:
    """
    Run a query from time to time, in a thread. It stops when the process is frozen, so that the server ends the session then.

    Args:
        every: seconds between two queries.
    """
    ended = threading.Event()

    def ping() -> None:
        while not ended.wait(every):
            try:
                connection.execute("SELECT 1")
            except psycopg.Error:  # also in a failed transaction, which is alive all the same
                if connection.closed:
                    return

    thread = threading.Thread(target=ping, name="outbox keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

"""
Tells PostgreSQL that handlers are at work whose transactions are idle: they call another service, say.

The inbox has the server end a transaction that is idle for longer than `INVISIBLE`: its process is frozen, and others wait. A
process that lives sends a statement now and then, from one thread for all its handlers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from outbox import conf

SHARE = 4  # a statement in each such part of INVISIBLE


@dataclass(slots=True)
class _Work:
    """A handler at work. Whoever ends or touches it holds the lock: a statement behind its COMMIT would open a transaction."""

    connection: psycopg.Connection[Any]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def touch(self) -> None:
        """Send a statement where the connection does nothing; one that is under way needs none."""
        with self.lock:
            if self.is_over or self.connection.lock.locked():
                return
            if self.connection.info.transaction_status is TransactionStatus.INTRANS:
                with suppress(psycopg.Error):  # what is wrong is the handler's to hear, at its next statement
                    psycopg.Cursor(self.connection).execute("SELECT 1")

    def end(self) -> None:
        """Keep it from being touched any more."""
        with self.lock:
            self.is_over = True


class KeepAlive:
    """Keeps transactions of this process alive, by a thread that is started at first use."""

    def __init__(self) -> None:
        self._at_work: dict[int, _Work] = {}  # by thread
        self._pause = float("inf")  # how long the thread waits now
        self._wake = threading.Event()
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def keep(self, connection: psycopg.Connection[Any]) -> Iterator[None]:
        """Keep the transaction of a connection from being ended while this thread works in the block."""
        thread, work = threading.get_ident(), _Work(connection)
        self._at_work[thread] = work
        if _pause() < self._pause:
            self._begin()
        try:
            yield
        finally:
            work.end()
            del self._at_work[thread]

    def _begin(self) -> None:
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outbox keeps transactions alive", daemon=True)
                self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        """Touch, again and again, what was there the last time already."""
        before: list[_Work] = []
        while True:
            self._pause = float("inf")  # before the look: who begins after it wakes this thread
            if self._at_work:
                self._pause = _pause()
            if not self._wake.wait(None if self._pause == float("inf") else self._pause):
                now = list(self._at_work.values())
                for work in now:
                    if any(work is one for one in before):
                        work.touch()
                before = now
            self._wake.clear()


def _pause() -> float:
    return conf.settings().consumer.invisible.total_seconds() / SHARE


keep_alive = KeepAlive()


def _begin_anew() -> None:
    """No thread goes through a fork."""
    global keep_alive
    keep_alive = KeepAlive()


os.register_at_fork(after_in_child=_begin_anew)


def kept_alive(connection: psycopg.Connection[Any]) -> AbstractContextManager[None]:
    """Keep the transaction of a connection from being ended while this thread works in the `with` block."""
    return keep_alive.keep(connection)

"""The broker's own connection: opened at first use, opened again after it broke, and what its errors mean."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psycopg
from psycopg import errors

from outbox import database
from outbox.brokers.base import SendStatus
from outbox.embedded.options import CONNECT_TIMEOUT, EmbeddedOptions
from outbox.errors import BrokerUnavailable, NotMigrated

# Every statement here is served by an index, and its tables fill and empty in seconds: what statistics say of them is
# old. So it is planned once, by its shape alone; planning it each time costs more than running it. Nothing is done between
# two statements of a transaction: one that is idle is of a process that is frozen.
SETTINGS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "idle_in_transaction_session_timeout": "1s"}

LISTEN = "LISTEN outbox_embedded"
REGISTER = "INSERT INTO outbox_embedded_wakeup (pid) VALUES (pg_backend_pid()) ON CONFLICT DO NOTHING"
DEREGISTER = "DELETE FROM outbox_embedded_wakeup WHERE pid = pg_backend_pid()"

# Consumers that died while they waited would have every commit notify for ever.
FORGET_DEAD_WAITERS = """
DELETE FROM outbox_embedded_wakeup i
WHERE NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = i.pid) OR i.pid = pg_backend_pid()
"""


NO_TABLES = (
    "The tables of the embedded broker are missing. Add its app to the settings, "
    'INSTALLED_APPS += ["outbox.embedded"], and run manage.py migrate on the database that its OPTIONS name.'
)


@dataclass(frozen=True, slots=True)
class Lull:
    """
    A time in which there is nothing for a group but what commits tell of.

    Args:
        reads: the group, and the ids of the topics it reads.
        until: seconds of the monotonic clock.
    """

    reads: tuple[str, tuple[int, ...]]
    until: float


class Client:
    """One connection in autocommit, for one call at a time. Only `close` may come from another thread meanwhile."""

    def __init__(self, options: EmbeddedOptions) -> None:
        self._options = options
        self._connection: database.OwnConnection | None = None
        self._is_listening = False
        self._in_call = threading.Lock()
        self.is_registered = False  # commits tell this connection of new messages
        self.lull: Lull | None = None
        self.is_closing = False  # a call that waits returns soon

    @contextmanager
    def call(self) -> Iterator[database.Connection]:
        """
        Hold the connection for one call of the broker's.

        Raises:
            BrokerUnavailable: the database cannot be reached; nothing was sent to it.
        """
        with self._in_call:
            yield self.connection()

    @contextmanager
    def translated(self) -> Iterator[database.Connection]:
        """
        Hold the connection for one call that returns no results.

        Raises:
            BrokerUnavailable: the database cannot be reached, or failed meanwhile.
        """
        try:
            with self.call() as connection:
                yield connection
        except errors.UndefinedTable as error:
            raise BrokerUnavailable(f"{NO_TABLES} ({str(error).splitlines()[0]})") from error
        except psycopg.Error as error:
            raise BrokerUnavailable(f"The embedded broker's database failed; what was under way comes again. {error}") from error

    def connection(self) -> database.OwnConnection:
        """
        Return the connection, a new one where there is none or the last one broke.

        Raises:
            BrokerUnavailable: the database cannot be reached; nothing was sent to it.
        """
        if self._connection is None or self._connection.closed:
            self._connection = self._open()
        return self._connection

    def _open(self) -> database.OwnConnection:
        options = self._options
        try:
            connection = database.connect(
                options.database,
                application_name="outbox embedded broker",
                settings={**SETTINGS, "statement_timeout": str(int(options.statement_timeout.total_seconds() * 1000))},
                connect_timeout=round(CONNECT_TIMEOUT.total_seconds()),
            )
        except psycopg.OperationalError as error:
            raise BrokerUnavailable(f"Database {options.database!r} cannot be reached, it is tried again: {error}") from error
        self._is_listening = self.is_registered = False
        self.lull = None
        return connection

    def register(self) -> bool:
        """
        Be told of new messages from now on. Return whether that is new: what came before was not told of.

        False as well behind a pooler, where nobody is told.
        """
        connection = self.connection()
        if self.is_registered or connection.is_pooled:
            return False
        if not self._is_listening:
            connection.execute(LISTEN)
            connection.execute(FORGET_DEAD_WAITERS)
            self._is_listening = True
        connection.execute(REGISTER)
        self.is_registered = True
        return True

    def deregister(self) -> None:
        """Be told of nothing more: who is busy looks anyway, and each telling costs the one who commits."""
        if self.is_registered and self._connection is not None and not self._connection.closed:
            self._connection.execute(DEREGISTER)
        self.is_registered = False
        self.lull = None

    def deregister_while_idle(self) -> None:
        """
        Deregister from another thread, if no call is under way: whoever handles something for long reads no notices.

        Their server process would stand still when some thousand are on the way, and the queue of them all grow behind it.
        """
        if self.is_registered and self._in_call.acquire(blocking=False):
            try:
                with suppress(psycopg.Error):  # the next call meets it, too
                    self.deregister()
            finally:
                self._in_call.release()

    def notices(self) -> set[str]:
        """Return what was told until now, each once."""
        return self.wait(0) if self.is_registered else set()

    def wait(self, seconds: float) -> set[str]:
        """Wait so long, or until something is told; return what is."""
        if not self.is_registered:
            time.sleep(seconds)
            return set()
        return {notice.payload for notice in self.connection().notifies(timeout=seconds, stop_after=1 if seconds else None)}

    def close(self) -> None:
        """Close the connection when the call that is under way has ended. The next use opens another."""
        self.is_closing = True
        with self._in_call:
            if self._connection is not None:
                with suppress(psycopg.Error):  # it may be broken; the next who registers removes what is left
                    self.deregister()
                self._connection.close()
                self._connection = None
            self.is_closing = False


@contextmanager
def tables_there() -> Iterator[None]:
    """Raise NotMigrated where the broker's tables are missing."""
    try:
        yield
    except errors.UndefinedTable as error:
        raise NotMigrated(f"{NO_TABLES} {error}") from error


def reason_of(error: psycopg.Error) -> str:
    """Return what an operator should read of an error."""
    return f"{NO_TABLES} {error}" if isinstance(error, errors.UndefinedTable) else f"{type(error).__name__}: {error}"


def status_of(error: psycopg.Error) -> SendStatus:
    """
    Return what a statement's error means for the messages in it.

    An error that the server reports ended its transaction: nothing is stored. A connection that is lost says nothing.
    Source: PostgreSQL, Appendix A, error classes.
    """
    state = error.sqlstate or ""
    if isinstance(error, (errors.UndefinedTable, errors.UndefinedColumn, errors.InsufficientPrivilege)):
        return SendStatus.MISCONFIGURED
    if isinstance(error, psycopg.DataError) or state.startswith("54"):
        return SendStatus.REFUSED
    if not state or state.startswith(("08", "57P")):
        return SendStatus.UNSURE
    return SendStatus.UNAVAILABLE

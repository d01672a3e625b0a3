"""
The broker's own database connection, and the results for messages after its errors.

The connection is opened when it is first used, and again after it was lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import psycopg
from psycopg import errors

from outbox import database
from outbox.brokers.base import SendResult, SendStatus
from outbox.database.connections import MISCONFIGURED
from outbox.embedded.options import CONNECT_TIMEOUT, EmbeddedOptions
from outbox.errors import BrokerUnavailable, NotMigrated

T = TypeVar("T")
Operation = Callable[[database.Connection, Sequence[T]], list[SendResult]]

# The broker's tables fill and empty within seconds, so the planner's statistics are outdated, and each statement is made to use
# an index. A generic plan is made only once, while planning each execution would cost more than the execution. The broker does
# nothing between two statements of a transaction, so a transaction that is idle for a second belongs to a frozen process.
SETTINGS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "idle_in_transaction_session_timeout": "1s"}

NOT_VALID = None, 0.0  # a value of `scan_validity` that makes the next receive scan all queues

LISTEN = "LISTEN outbox_embedded"
REGISTER = "INSERT INTO outbox_embedded_wakeup (pid) VALUES (pg_backend_pid()) ON CONFLICT DO NOTHING"
DEREGISTER = "DELETE FROM outbox_embedded_wakeup WHERE pid = pg_backend_pid()"

# Deletes rows of consumers that died while they waited, because every commit would notify on their behalf. A connection that has
# not registered yet may find a row with its own pid: that of an earlier server process.
FORGET_DEAD_WAITERS = """
DELETE FROM outbox_embedded_wakeup waiter
WHERE NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = waiter.pid) OR pid = pg_backend_pid()
"""


def missing_tables(alias: str) -> NotMigrated:
    """Return the exception for a database without the broker's tables."""
    return NotMigrated(
        f"The tables of the embedded broker are missing in database {alias!r}.",
        hint=f"Run manage.py migrate --database {alias}.",
    )


class EmbeddedClient:
    """
    A connection in autocommit mode, for one call at a time.

    During a call, another thread may call `close` and `deregister_while_idle`.
    """

    def __init__(self, options: EmbeddedOptions) -> None:
        self._options = options
        self._connection: database.OwnConnection | None = None
        self._is_listening = False
        self._call_lock = threading.Lock()
        self.is_registered = False  # whether commits notify this connection of new messages
        # The group and topic ids of the last scan, and until when (`monotonic`) no other scan is needed, because notifications
        # name every queue in which a message becomes visible.
        self.scan_validity: tuple[object, float] = NOT_VALID
        self.is_closing = False  # makes a waiting call return soon

    @contextmanager
    def call(self) -> Iterator[database.Connection]:
        """
        Hold the connection for one call of the broker.

        Raises:
            BrokerUnavailable: the database cannot be reached; nothing was sent to it.
        """
        with self._call_lock:
            yield self.connection()

    @contextmanager
    def translating_errors(self) -> Iterator[database.Connection]:
        """
        Hold the connection for one call of the broker, and turn database errors into BrokerUnavailable.

        Raises:
            BrokerUnavailable: the database cannot be reached, or has returned an error.
        """
        try:
            with self.call() as connection:
                yield connection
        except errors.UndefinedTable as error:
            missing = missing_tables(self._options.database)
            raise BrokerUnavailable(missing.message, missing.hint) from error
        except psycopg.Error as error:
            raise BrokerUnavailable(f"The embedded broker's database failed; the call will be repeated. {error}") from error

    def connection(self) -> database.OwnConnection:
        """
        Return the connection. It is opened if there is none, or if the last one was lost.

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
            raise BrokerUnavailable(f"Database {options.database!r} cannot be reached: {error}") from error
        self._is_listening = self.is_registered = False
        self.scan_validity = NOT_VALID
        return connection

    def register(self) -> bool:
        """
        Register for notifications of new messages. If this is a new registration, return True: the caller must scan once more.

        A pooled connection is never registered, because poolers do not pass notifications on.
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
        """Deregister from notifications. A busy consumer does not need them, and they cost the publisher time."""
        if self.is_registered and self._connection is not None and not self._connection.closed:
            self._connection.execute(DEREGISTER)
        self.is_registered = False
        self.scan_validity = NOT_VALID

    def deregister_while_idle(self) -> None:
        """
        Deregister from notifications, unless a call is in progress. Another thread calls this while a handler runs.

        A consumer with a slow handler does not read notifications. After some thousand unread ones, its server process would
        block, and PostgreSQL's shared notification queue would grow.
        """
        if self.is_registered and self._call_lock.acquire(blocking=False):
            try:
                with suppress(psycopg.Error):  # the next call will report it
                    self.deregister()
            finally:
                self._call_lock.release()

    def notifications(self) -> set[str]:
        """Return the payloads of the notifications that have been received, without a wait."""
        return self.wait(0) if self.is_registered else set()

    def wait(self, seconds: float) -> set[str]:
        """Wait for the first notification, or until the timeout is over. Return the payloads. If not registered, only wait."""
        if not self.is_registered:
            time.sleep(seconds)
            return set()
        return {notice.payload for notice in self.connection().notifies(timeout=seconds, stop_after=1 if seconds else None)}

    def reason_of(self, error: psycopg.Error) -> str:
        """Return a text for operators about an error."""
        if isinstance(error, errors.UndefinedTable):
            return str(missing_tables(self._options.database))
        return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close the connection after the current call. The next use opens a new one."""
        self.is_closing = True
        with self._call_lock:
            if self._connection is not None:
                with suppress(psycopg.Error):  # on a lost connection, the next client that registers deletes the row
                    self.deregister()
                self._connection.close()
                self._connection = None
            self.is_closing = False


@contextmanager
def requiring_tables(alias: str) -> Iterator[None]:
    """Raise NotMigrated if a statement in the block finds the broker's tables missing."""
    try:
        yield
    except errors.UndefinedTable as error:
        raise missing_tables(alias) from error


def status_of(error: psycopg.Error) -> SendStatus:
    """
    Return the status of the messages in a statement that failed.

    If the server reports an error, the transaction was rolled back, so nothing is stored. After a lost connection, it is unknown
    whether the messages are stored. docs/guarantees.md has the table. Source: PostgreSQL, Appendix A, error classes.
    """
    state = error.sqlstate or ""
    if state.startswith(MISCONFIGURED):
        return SendStatus.MISCONFIGURED
    if isinstance(error, psycopg.DataError) or state.startswith("54"):
        return SendStatus.REFUSED
    if not state or state.startswith(("08", "57P")):
        return SendStatus.UNSURE
    return SendStatus.UNAVAILABLE


def results_of(client: EmbeddedClient, given: Sequence[T], operation: Operation[T]) -> list[SendResult]:
    """
    Execute an operation for all items in one statement, and return a result for each.

    If the database rejects the data of an item, the items are split in halves until it is alone, so that the others succeed.
    """
    try:
        return _execute(client, given, operation)
    except BrokerUnavailable as error:
        return [SendResult(SendStatus.UNAVAILABLE, reason=str(error))] * len(given)
    except psycopg.Error as error:
        status = status_of(error)
        if status is SendStatus.REFUSED and len(given) > 1:
            middle = len(given) // 2
            return results_of(client, given[:middle], operation) + results_of(client, given[middle:], operation)
        return [SendResult(status, reason=client.reason_of(error))] * len(given)


def _execute(client: EmbeddedClient, given: Sequence[T], operation: Operation[T]) -> list[SendResult]:
    with client.call() as connection:
        try:
            return operation(connection, given)
        except errors.DeadlockDetected:  # another process ends the same half messages in another order; nothing was changed
            return operation(connection, given)

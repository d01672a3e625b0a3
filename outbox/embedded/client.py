"""The broker's own connection, which is opened at first use and again after it broke; and the results that its errors mean."""

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
Act = Callable[[database.Connection, Sequence[T]], list[SendResult]]

# Each statement of the broker uses an index, and its tables fill and empty within seconds, so that their statistics are
# outdated. A generic plan is made once; planning each time would cost more than running the statement. The broker does nothing
# between two statements of a transaction: if a transaction is idle, its process is frozen.
SETTINGS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "idle_in_transaction_session_timeout": "1s"}

NOT_VALID = None, 0.0

LISTEN = "LISTEN outbox_embedded"
REGISTER = "INSERT INTO outbox_embedded_wakeup (pid) VALUES (pg_backend_pid()) ON CONFLICT DO NOTHING"
DEREGISTER = "DELETE FROM outbox_embedded_wakeup WHERE pid = pg_backend_pid()"

# Rows of consumers that died while they waited. Each would cost every commit a notification.
FORGET_DEAD_WAITERS = """
DELETE FROM outbox_embedded_wakeup waiter
WHERE NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = waiter.pid) OR pid = pg_backend_pid()
"""


def no_tables(alias: str) -> NotMigrated:
    """Return the error that a database has no tables of the broker."""
    return NotMigrated(
        f"The tables of the embedded broker are missing in database {alias!r}.",
        hint=f"Run manage.py migrate --database {alias}.",
    )


class EmbeddedClient:
    """A connection in autocommit, for one call at a time. Only `close` may be called from another thread meanwhile."""

    def __init__(self, options: EmbeddedOptions) -> None:
        self._options = options
        self._connection: database.OwnConnection | None = None
        self._is_listening = False
        self._in_call = threading.Lock()
        self.is_registered = False  # whether commits notify this connection of new messages
        # The group and topics of the last scan, and its end in monotonic seconds: until then, commits notify of all that is new.
        self.scan_validity: tuple[object, float] = NOT_VALID
        self.is_closing = False  # if it is, a call that waits returns soon

    @contextmanager
    def call(self) -> Iterator[database.Connection]:
        """
        Hold the connection for one call of the broker.

        Raises:
            BrokerUnavailable: the database cannot be reached; nothing was sent to it.
        """
        with self._in_call:
            yield self.connection()

    @contextmanager
    def translated(self) -> Iterator[database.Connection]:
        """
        Hold the connection for one call of the broker, and turn database errors into BrokerUnavailable.

        Raises:
            BrokerUnavailable: the database cannot be reached, or failed meanwhile.
        """
        try:
            with self.call() as connection:
                yield connection
        except errors.UndefinedTable as error:
            missing = no_tables(self._options.database)
            raise BrokerUnavailable(missing.message, missing.hint) from error
        except psycopg.Error as error:
            raise BrokerUnavailable(f"The embedded broker's database failed; the call will be repeated. {error}") from error

    def connection(self) -> database.OwnConnection:
        """
        Return the connection; opens a new one if there is none, or the last one broke.

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
        Register for notifications of new messages; return whether this is new, so that a scan must follow.

        False behind a pooler, too, where notifications do not work.
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
        """Deregister from notifications: a busy consumer scans anyway, and each notification costs the publisher."""
        if self.is_registered and self._connection is not None and not self._connection.closed:
            self._connection.execute(DEREGISTER)
        self.is_registered = False
        self.scan_validity = NOT_VALID

    def deregister_while_idle(self) -> None:
        """
        Deregister from another thread, if no call is under way. A consumer with a slow handler reads no notifications.

        After some thousand unread notifications its server process would block, and PostgreSQL's shared notification queue
        would grow.
        """
        if self.is_registered and self._in_call.acquire(blocking=False):
            try:
                with suppress(psycopg.Error):  # the next call will report it
                    self.deregister()
            finally:
                self._in_call.release()

    def notifications(self) -> set[str]:
        """Return the payloads of the notifications received until now."""
        return self.wait(0) if self.is_registered else set()

    def wait(self, seconds: float) -> set[str]:
        """Wait for the first notification, or until the timeout is over; return the payloads."""
        if not self.is_registered:
            time.sleep(seconds)
            return set()
        return {notice.payload for notice in self.connection().notifies(timeout=seconds, stop_after=1 if seconds else None)}

    def reason_of(self, error: psycopg.Error) -> str:
        """Return the text of an error for operators."""
        if isinstance(error, errors.UndefinedTable):
            return str(no_tables(self._options.database))
        return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close the connection after the call under way. The next use opens another."""
        self.is_closing = True
        with self._in_call:
            if self._connection is not None:
                with suppress(psycopg.Error):  # if it is broken, the next client that registers deletes the row
                    self.deregister()
                self._connection.close()
                self._connection = None
            self.is_closing = False


@contextmanager
def tables_there(alias: str) -> Iterator[None]:
    """Raise NotMigrated where the broker's tables are missing in a database."""
    try:
        yield
    except errors.UndefinedTable as error:
        raise no_tables(alias) from error


def status_of(error: psycopg.Error) -> SendStatus:
    """
    Return the status of the messages in a statement that failed.

    After an error that the server reports, the transaction was rolled back and nothing is stored. After a lost connection this
    is unknown. docs/guarantees.md has the table. Source: PostgreSQL, Appendix A, error classes.
    """
    state = error.sqlstate or ""
    if state.startswith(MISCONFIGURED):
        return SendStatus.MISCONFIGURED
    if isinstance(error, psycopg.DataError) or state.startswith("54"):
        return SendStatus.REFUSED
    if not state or state.startswith(("08", "57P")):
        return SendStatus.UNSURE
    return SendStatus.UNAVAILABLE


def results_of(client: EmbeddedClient, given: Sequence[T], act: Act[T]) -> list[SendResult]:
    """
    Act on all items in one statement; return a result for each.

    When the database rejects the data of one item, halve the items until it is alone, so that the others succeed.
    """
    try:
        return _act(client, given, act)
    except BrokerUnavailable as error:
        return [SendResult(SendStatus.UNAVAILABLE, reason=str(error))] * len(given)
    except psycopg.Error as error:
        status = status_of(error)
        if status is SendStatus.REFUSED and len(given) > 1:
            middle = len(given) // 2
            return results_of(client, given[:middle], act) + results_of(client, given[middle:], act)
        return [SendResult(status, reason=client.reason_of(error))] * len(given)


def _act(client: EmbeddedClient, given: Sequence[T], act: Act[T]) -> list[SendResult]:
    with client.call() as connection:
        try:
            return act(connection, given)
        except errors.DeadlockDetected:  # with another end of the same half messages in another order; nothing was done
            return act(connection, given)

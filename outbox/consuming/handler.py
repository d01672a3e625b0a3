"""Call a handler in the transaction that also writes its message's inbox row, while the lease thread watches the handler."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import psycopg
from django.db import Error as DatabaseError
from django.db import OperationalError, connections, transaction
from psycopg.pq import TransactionStatus

from outbox import database, tracing
from outbox.brokers.base import Delivery
from outbox.consuming.delivery_info import Context, as_key, fields_of
from outbox.consuming.failures import causes
from outbox.consuming.inbox import Claim
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.outcome import is_conflict
from outbox.consuming.register import Consumer, Group
from outbox.database.guarded import as_innermost
from outbox.errors import BrokenTransaction, ClosedByHandler, InboxRefused, NotOutermost
from outbox.logs import get_logger
from outbox.message import Cause, Header, current_cause
from outbox.shutdown import handler_runs, is_shutdown
from outbox.unawaited import awaiting_all

logger = get_logger(__name__)

DURABLE_IS_NESTED = "A durable atomic block cannot be nested"  # the beginning of the text of Django's RuntimeError


class HandlerRun(msgspec.Struct):
    """One call of a handler, with one message or several at once. After an exception, the fields tell what happened before."""

    group: Group
    deliveries: Sequence[Delivery]
    lease_thread: LeaseThread
    consumer: Consumer | None = None
    claims: list[Claim] = msgspec.field(default_factory=list)  # one per delivery; complete before the handler is called
    is_committed: bool = False

    def watch_commit(self) -> None:
        """Arrange that `is_committed` is set when the current transaction is committed."""
        if len(connections[self.group.using].atomic_blocks) == 1:  # otherwise a test's transaction, which is never committed
            transaction.on_commit(lambda: setattr(self, "is_committed", True), using=self.group.using)

    def call(self, consumer: Consumer, messages: list[Any], contexts: list[Context]) -> None:
        """Call the handler with the claimed messages and their contexts, in the current transaction."""
        connection = connections[consumer.using].connection
        with (
            self.lease_thread.handler_at_work(connection, consumer, self.deliveries[0]),
            tracing.process(consumer.group, self.deliveries),
        ):
            _call(consumer, messages, contexts)
        _check_transaction(consumer)

    def error_at_shutdown(self, error: BaseException) -> BaseException | None:
        """Return the error if it shuts the process down, and is not an error of the handler; otherwise None."""
        return error if is_shutdown(error, is_requested=self.lease_thread.stop.is_set()) else None

    def report_callback(self, error: BaseException) -> None:
        """Log the error of an `on_commit` callback, which does not change the result."""
        text = "Message %s was handled, but a callback after its commit failed."
        ids = ", ".join(delivery.message_id for delivery in self.deliveries)
        logger.error(text, ids, exc_info=error, extra=fields_of(*self.deliveries))


@contextmanager
def inbox_statements() -> Iterator[None]:
    """Raise `InboxRefused` if the database refuses all writes, in a block with the outbox's own statements and no handler."""
    try:
        yield
    except (DatabaseError, psycopg.Error) as error:
        if database.refuses_all(error):
            raise InboxRefused(str(error).strip()) from error
        raise


def _call(consumer: Consumer, messages: list[Any], contexts: list[Context]) -> None:
    context = contexts[0]
    correlation_id = context.headers.get(Header.CORRELATION_ID) or context.message_id
    ids = context.message_id, correlation_id, context.headers.get(Header.TRACEPARENT, "")  # shortened, since they may be long
    token = current_cause.set(Cause(*map(as_key, ids)) if len(contexts) == 1 else None)
    try:
        with as_innermost(consumer.using), handler_runs(), awaiting_all():
            result = consumer.handler(messages, contexts) if consumer.batch_size else consumer.handler(messages[0], context)
    except RuntimeError as error:
        if DURABLE_IS_NESTED not in str(error):
            raise
        raise NotOutermost(
            f"{consumer.name} entered atomic(durable=True), but a handler runs inside the transaction that commits its inbox "
            "row.",
            hint="Use atomic() there: the handler's writes are committed when it returns. For work that has to be committed "
            "separately, publish another message from the handler.",
        ) from error
    finally:
        current_cause.reset(token)
    if inspect.isawaitable(result) or isinstance(result, Iterator | AsyncIterator):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            f"{consumer.name} returned a {type(result).__name__}, whose code has not run. Put @consumer right above `async def`, "
            "or mark the wrapper with asgiref.sync.markcoroutinefunction(). A handler must not return a generator or iterator."
        )


def _check_transaction(consumer: Consumer) -> None:
    """Raise an error if Django or PostgreSQL would silently roll back the transaction instead of committing it."""
    connection = connections[consumer.using]
    status = connection.connection.pgconn.transaction_status if connection.connection else TransactionStatus.UNKNOWN
    if connection.needs_rollback or status != TransactionStatus.INTRANS:
        if connection.closed_in_transaction:
            raise ClosedByHandler(
                f"{consumer.name} closed the connection of database {consumer.using!r}, and so ended the transaction that "
                "would have committed its work and its inbox row. Do not close the connection in a handler."
            )
        raise BrokenTransaction(
            f"{consumer.name} returned with a broken transaction: it caught an error of the database, or of an atomic "
            "block, that had aborted the transaction. Put the statement that may fail into a separate atomic() block, "
            "and catch the error outside of that block."
        )


def is_outage(error: BaseException, before: Any) -> bool:
    """
    Return whether an outage of the database caused an error, and not the handler.

    Args:
        before: the psycopg connection that Django had before the run; None if it had none.
    """
    if isinstance(error, ClosedByHandler):
        return False
    if before is None:  # then an OperationalError means that the connection could not be opened, or was lost
        return isinstance(error, OperationalError | psycopg.OperationalError) and not is_conflict(error)
    return before.closed and any(isinstance(cause, DatabaseError | psycopg.Error | BrokenTransaction) for cause in causes(error))

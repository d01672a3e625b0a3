"""One delivery, brought to its outcome in the database. What the broker hears of it is `worker.py`'s."""

from __future__ import annotations

import enum
import inspect
import logging
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import psycopg
from django.db import Error as DatabaseError
from django.db import connections
from psycopg.pq import TransactionStatus

from outbox import conf, signals
from outbox.brokers.base import Delivery
from outbox.consuming import failure, inbox
from outbox.consuming.context import Context
from outbox.consuming.delivery_info import DeliveryInfo, context_of
from outbox.consuming.keep_alive import kept_alive
from outbox.consuming.read import find_consumer, read
from outbox.consuming.register import Consumer, Group
from outbox.consuming.retry import Retry
from outbox.database.outermost import outermost_transaction
from outbox.ending import handler_runs
from outbox.errors import BrokenTransaction, Reject, RetryLater, UnknownMessageType
from outbox.failpoints import failpoint
from outbox.message import Cause, Header, current_cause

logger = logging.getLogger(__name__)

# The code that a message needs may be on its way: from a minute to two hours apart, about 9 hours in all.
WAIT_FOR_CODE = Retry(limit=16, delays=conf.RETRY_DELAYS[4:])

# A database that goes away says nothing about the handler; one that goes away each time does.
OUTLAST_OUTAGES = Retry(limit=50)


class Outcome(enum.StrEnum):
    """What became of a delivery. The first three are acknowledged."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"  # the group had handled it before
    PASSED_OVER = "passed over"  # no handler of the group takes it
    RETRY = "retry"
    DEAD_LETTER = "dead letter"


@dataclass(frozen=True, slots=True)
class Result:
    """
    Args:
        after: with RETRY, deliver it again after that time.
        reason: with DEAD_LETTER, why.
        is_outage: the database went away; the handler is not to blame.
        is_busy: another process handles the message now. It comes again when INVISIBLE is over, by itself.
    """

    outcome: Outcome
    after: timedelta = timedelta(0)
    reason: str = ""
    is_outage: bool = False
    is_busy: bool = False


def handle(group: Group, delivery: Delivery) -> Result:
    """
    Apply a message once: inbox row, the handler's writes and what it publishes commit together.

    An error of the handler, or a message that cannot be read, is an outcome and does not raise.
    """
    consumer = None
    connection = connections[group.using].connection
    try:
        consumer = find_consumer(group, delivery)
        if consumer is None:
            inbox.ignore(DeliveryInfo.of(delivery), group.using)
            return Result(Outcome.PASSED_OVER)
        return _apply(consumer, delivery)
    except Exception as error:
        is_outage = _is_outage(error, connection)
        result = replace(_decide(consumer, delivery, error, is_outage=is_outage), is_outage=is_outage)
        _write_down(delivery, result, error, group.using)
        return result


def _apply(consumer: Consumer, delivery: Delivery) -> Result:
    message = read(consumer, delivery)
    key = _dedupe_key(consumer, message, delivery)
    arrival = DeliveryInfo.of(delivery)
    failpoint("consumer.before_handler")
    with outermost_transaction(consumer.using):  # what returns is acknowledged
        claim = inbox.claim(arrival, key, consumer.using)
        if claim is inbox.Claim.BUSY:
            return Result(Outcome.RETRY, is_busy=True)
        if claim is inbox.Claim.HANDLED:
            inbox.drop(arrival, key, consumer.using)
            return Result(Outcome.DUPLICATE)
        with kept_alive(connections[consumer.using].connection):
            _call(consumer, message, context_of(delivery, key))
        _check_transaction(consumer)
        failpoint("consumer.after_handler")
    failpoint("consumer.after_commit")
    return Result(Outcome.HANDLED)


def _dedupe_key(consumer: Consumer, message: object, delivery: Delivery) -> str:
    own = consumer.dedupe(message) if consumer.dedupe else None
    # The subject keeps the keys of a group's handlers apart from each other, and from message ids.
    return delivery.message_id if own is None else f"{consumer.subject}:{own}"


def _call(consumer: Consumer, message: object, context: Context) -> None:
    correlation_id = context.headers.get(Header.CORRELATION_ID) or context.message_id
    traceparent = context.headers.get(Header.TRACEPARENT, "")
    before = current_cause.set(Cause(context.message_id, correlation_id, traceparent))
    try:
        with handler_runs():
            result = consumer.handler(message, context)
    finally:
        current_cause.reset(before)
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(
            f"{consumer.name} returned a coroutine, and is not marked as a coroutine function: it was not awaited. Put "
            "@consumer right above `async def`, or mark what wraps it by asgiref.sync.markcoroutinefunction()."
        )


def _check_transaction(consumer: Consumer) -> None:
    """Raise where the commit would silently be a rollback, on Django's side or on PostgreSQL's."""
    connection = connections[consumer.using]
    status = connection.connection.info.transaction_status if connection.connection else TransactionStatus.UNKNOWN
    if connection.needs_rollback or status is not TransactionStatus.INTRANS:
        raise BrokenTransaction(
            f"{consumer.name} returned with its transaction broken: it caught an error of the database, or of an atomic "
            "block, that its transaction did not survive. Put the statement that may fail into an atomic() of its own "
            "and catch the error outside that."
        )


def _decide(consumer: Consumer | None, delivery: Delivery, error: Exception, *, is_outage: bool) -> Result:
    policy = consumer.retry if consumer else WAIT_FOR_CODE
    if is_outage:
        policy = OUTLAST_OUTAGES
    elif isinstance(error, UnknownMessageType):
        policy = WAIT_FOR_CODE
    if isinstance(error, RetryLater):
        return Result(Outcome.RETRY, after=error.after)
    if isinstance(error, Reject):
        return Result(Outcome.DEAD_LETTER, reason=failure.storable(str(error)) or "rejected by its handler")
    if isinstance(error, policy.on) and policy.allows(delivery.attempt):
        return Result(Outcome.RETRY, after=policy.delay(delivery.attempt))
    if consumer and consumer.ordered and consumer.on_dead == "block":
        _tell_blocked(consumer, delivery, error)
        return Result(Outcome.RETRY, after=policy.delays[-1])
    return Result(Outcome.DEAD_LETTER, reason=f"attempt {delivery.attempt}: {failure.describe(error)}")


def _is_outage(error: Exception, before: Any) -> bool:
    """Say whether the database, not the handler, is to blame: the connection that was there before is gone."""
    is_of_database = isinstance(error, DatabaseError | psycopg.Error | BrokenTransaction)
    return is_of_database and (before is None or before.closed)


def _tell_blocked(consumer: Consumer, delivery: Delivery, error: Exception) -> None:
    text = (
        f"{consumer.name} has failed {delivery.attempt} times with message {delivery.message_id}; in topic "
        f"{delivery.topic!r} it holds back all later messages of the key {delivery.key!r} from group "
        f"{delivery.group!r}. Correct the handler, or have it raise Reject for this message."
    )
    logger.error("%s Last: %s", text, failure.describe(error))
    signals.alarm.send_robust(
        sender=Consumer,
        reason=text,
        details={"group": delivery.group, "message_id": delivery.message_id, "topic": delivery.topic},
    )


def _log(delivery: Delivery, result: Result, error: Exception) -> None:
    """Log a failed try: with its traceback when the error is new to this process, and when the message is given up."""
    is_last = result.outcome is Outcome.DEAD_LETTER
    is_told = isinstance(error, RetryLater | Reject)  # the handler says all there is to say
    is_traced = not is_told and (failure.is_new(error) or is_last)
    logger.log(
        logging.ERROR if is_last else logging.WARNING,
        "Message %s on topic %r, attempt %s of group %r: %s. %s",
        delivery.message_id,
        delivery.topic,
        delivery.attempt,
        delivery.group,
        "dead letter" if is_last else f"retry in {result.after.total_seconds():.1f} s",
        failure.describe(error),
        exc_info=error if is_traced else None,
    )


def _write_down(delivery: Delivery, result: Result, error: Exception, using: str) -> None:
    _log(delivery, result, error)
    try:
        failure.record(DeliveryInfo.of(delivery), result.outcome, error, using)
    except DatabaseError:
        logger.exception("Message %s: its failure could not be written down.", delivery.message_id)

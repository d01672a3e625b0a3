"""
Handle messages at their first delivery, or defer them. Nothing here calls the broker: `worker.py` acknowledges the messages.

A message that cannot be handled now is deferred: it is stored in the group's database, and run later (`run_deferred.py`). The
result of a delivery is returned; if it is RELEASED, the worker returns the delivery to the broker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import psycopg
from django.db import Error as DatabaseError
from django.db import connections
from msgspec.structs import replace

from outbox import database, tracing
from outbox.brokers.base import Delivery
from outbox.consuming import deferred, subscriptions
from outbox.consuming.deferred import Deferral, Reason
from outbox.consuming.delivery_info import DeliveryInfo, context_of, fields_of, order_key_of, require_id
from outbox.consuming.failures import describe, record_failure
from outbox.consuming.handler import HandlerRun, inbox_statements, is_outage
from outbox.consuming.inbox import Claim, InboxEntry, claim, claim_many, drop
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.outcome import (
    DUPLICATE,
    HANDLED,
    IGNORED,
    RELEASED,
    HandlingResult,
    Outcome,
    decide_deferral,
    is_conflict,
    report_failure,
)
from outbox.consuming.read import find_consumer, read
from outbox.consuming.register import Consumer, Group
from outbox.database.guarded import guarded_transaction
from outbox.errors import InboxRefused
from outbox.failpoints import FailpointReached, failpoint
from outbox.logs import get_logger

logger = get_logger(__name__)

LOCK_TRIES = 3  # tries of `deferred.defer`; each may wait a second for another process that is storing the same message


def handle(group: Group, delivery: Delivery, lease_thread: LeaseThread | None = None) -> HandlingResult:
    """
    Handle a message once: the inbox row, the handler's writes and the messages that it publishes are committed together.

    If the handler raises an exception, or the message cannot be decoded, the message is deferred, and nothing is raised. A
    redelivered message is deferred, too: it may have killed a process, so the beginning of its next run has to be recorded first.
    Without a `lease_thread`, a temporary one watches the handler.
    """
    if lease_thread is None:
        with closing(LeaseThread()) as own_thread:
            return handle(group, delivery, own_thread)
    run = HandlerRun(group, [delivery], lease_thread)
    connection_before = connections[group.using].connection
    try:
        require_id(delivery)
        run.consumer = find_consumer(group, delivery)
        if run.consumer is None:
            return ignore(group, [delivery])[0]
        if delivery.delivery_count > 1:
            return defer(group, [(delivery, Deferral.unhandled(Reason.AGAIN, delivery))])[0]
        return _claim_and_handle(run, run.consumer)[0]
    except FailpointReached:
        raise
    except BaseException as error:
        return (_results_in_spite_of(run, error) or [_after_error(run, delivery, error, connection_before)])[0]


def handle_together(group: Group, deliveries: Sequence[Delivery], lease_thread: LeaseThread) -> list[HandlingResult]:
    """Handle first deliveries, for a handler with a batch size, in one transaction; if that fails, handle each of them alone."""
    run = HandlerRun(group, deliveries, lease_thread)
    try:
        run.consumer = find_consumer(group, deliveries[0])
        if run.consumer is not None:
            return _claim_and_handle(run, run.consumer)
    except FailpointReached:
        raise
    except BaseException as error:
        if results := _results_in_spite_of(run, error):
            return results
        logger.warning(
            "Group %r failed to handle %s messages together, and now handles each of them alone: %s",
            group.name,
            len(deliveries),
            describe(error),
            extra=fields_of(*deliveries),
        )
    return _one_by_one(group, deliveries, lease_thread)


def _one_by_one(group: Group, deliveries: Sequence[Delivery], lease_thread: LeaseThread) -> list[HandlingResult]:
    results: list[HandlingResult] = []
    for delivery in deliveries:
        if results and (results[-1].outcome is Outcome.RELEASED or results[-1].error_to_raise):
            results.append(RELEASED)
        elif lease_thread.stop.is_set():
            results += defer(group, [(delivery, Deferral.unhandled(Reason.STOP, delivery))])
        else:
            results.append(handle(group, delivery, lease_thread))
    return results


def ignore(group: Group, deliveries: Sequence[Delivery]) -> list[HandlingResult]:
    """Ignore deliveries that no live process of the group subscribes to; defer those that only other processes subscribe to."""
    with inbox_statements(), guarded_transaction(group.using):
        for_others = subscriptions.ignore(group, deliveries)
    results = [IGNORED] * len(deliveries)
    indexes = sorted(for_others)
    others = [(deliveries[index], Deferral.unhandled(Reason.NO_HANDLER, deliveries[index])) for index in indexes]
    for index, result in zip(indexes, defer(group, others), strict=True):
        results[index] = result
    return results


def defer(
    group: Group, deferrals: Sequence[tuple[Delivery, Deferral]], error: BaseException | None = None
) -> list[HandlingResult]:
    """
    Store messages as deferred messages, so that their deliveries can be acknowledged. Messages that the group knows are dropped.

    If the database is unavailable or refuses to store them, the results are RELEASED. Never raises an `Exception`.

    Args:
        error: the error in handling them, which is recorded as a failure of each; None if their handler was not called.
    """
    if not deferrals:
        return []
    using = group.using
    for number in range(LOCK_TRIES):
        try:
            with deferred.own_transaction(using) as connection:
                are_new = deferred.defer(connection, group.name, deferrals)
                for (delivery, deferral), is_new in zip(deferrals, are_new, strict=True):
                    if is_new and error is not None:
                        record_failure(DeliveryInfo.of(delivery), failure_outcome(deferral), error, using)
            break
        except Exception as write_error:
            is_last = number == LOCK_TRIES - 1
            if is_last or not (isinstance(write_error, psycopg.errors.LockNotAvailable) or is_conflict(write_error)):
                return report_unrecorded([delivery for delivery, _ in deferrals], write_error)
    results = []
    for (delivery, deferral), is_new in zip(deferrals, are_new, strict=True):
        if is_new and error is not None:
            report_failure(delivery, deferral, error)
        outcome = Outcome.DEAD_LETTER if deferral.is_dead else Outcome.DEFERRED
        results.append(HandlingResult(outcome, order_key_of(delivery), error is not None) if is_new else DUPLICATE)
    return results


def failure_outcome(deferral: Deferral) -> str:
    return "dead letter" if deferral.is_dead else "retry"


def report_unrecorded(deliveries: Sequence[Delivery], write_error: Exception) -> list[HandlingResult]:
    """Log that nothing could be written about deliveries; return RELEASED for each, with an error if all writes are refused."""
    is_database_error = isinstance(write_error, DatabaseError | psycopg.Error)
    logger.warning(
        "Nothing could be recorded about message %s, so it is delivered or run again: %s",
        ", ".join(delivery.message_id for delivery in deliveries),
        str(write_error).strip(),
        exc_info=None if is_database_error else write_error,
        extra=fields_of(*deliveries),
    )
    inbox_error = InboxRefused(str(write_error).strip()) if database.refuses_all(write_error) else None
    return [replace(RELEASED, error_to_raise=inbox_error)] * len(deliveries)


def _after_error(run: HandlerRun, delivery: Delivery, error: BaseException, connection_before: Any) -> HandlingResult:
    """Defer the delivery that was handled alone, and raised an error; return RELEASED if the database caused the error."""
    if isinstance(error, InboxRefused):
        return replace(RELEASED, error_to_raise=error)
    if is_outage(error, connection_before):
        text = "Message %s was not handled, since the database failed; the broker delivers it again: %s"
        logger.warning(text, delivery.message_id, describe(error), extra=fields_of(delivery))
        return RELEASED
    try:
        database.drop_if_lost(run.group.using)
    except Exception as write_error:
        return report_unrecorded([delivery], write_error)[0]
    return defer(run.group, [(delivery, decide_deferral(run.group, run.consumer, delivery, error))], error)[0]


def _claim_and_handle(run: HandlerRun, consumer: Consumer) -> list[HandlingResult]:
    """Claim first deliveries, and handle the claimed ones in the same transaction; then defer those that others hold back."""
    messages = [read(consumer, delivery) for delivery in run.deliveries]
    entries = [InboxEntry.of(delivery, consumer, message) for message, delivery in zip(messages, run.deliveries, strict=True)]
    failpoint("consumer.before_handler")
    with guarded_transaction(consumer.using):  # after its commit, the worker acknowledges the claimed deliveries
        run.watch_commit()
        with inbox_statements():
            if len(entries) == 1 or consumer.idempotency_key:  # with a handler's key, each message is also found by its id
                run.claims = [claim(entry, consumer.using) for entry in entries]
            else:
                run.claims = claim_many(entries, consumer.using)
            for entry, claimed in zip(entries, run.claims, strict=True):
                if claimed is Claim.KNOWN:
                    drop(entry, consumer.using)
        claimed_indexes = [index for index, claimed in enumerate(run.claims) if claimed is Claim.CLAIMED]
        if claimed_indexes:
            contexts = [context_of(run.deliveries[index], entries[index].key, 0) for index in claimed_indexes]
            run.call(consumer, [messages[index] for index in claimed_indexes], contexts)
        failpoint("consumer.after_handler")
    tracing.record_handled(consumer.group, [run.deliveries[index] for index in claimed_indexes])
    failpoint("consumer.after_commit")
    return _results_of(run)


def _results_of(run: HandlerRun) -> list[HandlingResult]:
    """Defer the messages of a committed run that others hold back; return the results of all its deliveries."""
    results_by_claim = {Claim.CLAIMED: HANDLED, Claim.KNOWN: DUPLICATE}
    reasons = {Claim.BUSY: Reason.ELSEWHERE, Claim.BEHIND: Reason.BEHIND}
    unclaimed = [
        (delivery, Deferral.unhandled(reasons[claimed], delivery))
        for delivery, claimed in zip(run.deliveries, run.claims, strict=True)
        if claimed in reasons
    ]
    others = iter(defer(run.group, unclaimed))
    return [results_by_claim.get(claimed) or next(others) for claimed in run.claims]


def _results_in_spite_of(run: HandlerRun, error: BaseException) -> list[HandlingResult]:
    """
    Return the results of a run that was committed before the error, or that the end of the process interrupted.

    The messages of an interrupted run are deferred. Return an empty list for any other run, whose error the caller handles.
    """
    error_to_raise = run.error_at_shutdown(error)
    if run.is_committed:
        run.report_callback(error)
        return [replace(result, error_to_raise=error_to_raise) for result in _results_of(run)]
    if error_to_raise is None:
        return []
    stopped = [(delivery, Deferral.unhandled(Reason.STOP, delivery)) for delivery in run.deliveries]
    return [replace(result, error_to_raise=error_to_raise) for result in defer(run.group, stopped)]

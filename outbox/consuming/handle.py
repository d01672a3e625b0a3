"""Handle first deliveries: everything that happens in the database. `worker.py` settles them at the broker."""

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
from outbox.consuming.handler import HandlerRun, is_outage, own_statements
from outbox.consuming.inbox import Claim, InboxEntry, claim, claim_many, drop
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.outcome import DUPLICATE, HANDLED, IGNORED, RELEASED, HandlingResult, Outcome, is_conflict, judge, tell
from outbox.consuming.read import find_consumer, read
from outbox.consuming.register import Consumer, Group
from outbox.database.guarded import guarded_transaction
from outbox.errors import InboxRefused
from outbox.failpoints import FailpointReached, failpoint
from outbox.logs import get_logger

logger = get_logger(__name__)

LOCK_TRIES = 3  # at a DEFER that waits for another one of the same message, a second each


def handle(group: Group, delivery: Delivery, lease_thread: LeaseThread | None = None) -> HandlingResult:
    """
    Handle a message once: inbox row, the handler's writes and the messages it publishes commit together.

    Exceptions of the handler, and a message that cannot be decoded, result in a deferred message; they are not raised. One that
    was delivered before is deferred, too: the beginning of its next run has to be on record, since it may kill its process.
    """
    if lease_thread is None:
        with closing(LeaseThread()) as own:
            return handle(group, delivery, own)
    run = HandlerRun(group, [delivery], lease_thread)
    before = connections[group.using].connection
    try:
        require_id(delivery)
        run.consumer = find_consumer(group, delivery)
        if run.consumer is None:
            return ignore(group, [delivery])[0]
        if delivery.delivery_count > 1:
            return defer(group, [(delivery, Deferral.unhandled(Reason.AGAIN, delivery))])[0]
        return _handle_claimed(run, run.consumer)[0]
    except FailpointReached:
        raise
    except BaseException as error:
        return (_results_despite(run, error) or [_after_error(run, delivery, error, before)])[0]


def handle_together(group: Group, deliveries: Sequence[Delivery], lease_thread: LeaseThread) -> list[HandlingResult]:
    """
    Handle first deliveries of a handler with a batch size in one transaction; each alone where that fails.
    """
    run = HandlerRun(group, deliveries, lease_thread)
    try:
        run.consumer = find_consumer(group, deliveries[0])
        if run.consumer is not None:
            return _handle_claimed(run, run.consumer)
    except FailpointReached:
        raise
    except BaseException as error:
        if results := _results_despite(run, error):
            return results
        logger.warning(
            "Group %r failed with %s messages at once, and now handles each alone: %s",
            group.name,
            len(deliveries),
            describe(error),
            extra=fields_of(*deliveries),
        )
    return _one_by_one(group, deliveries, lease_thread)


def _one_by_one(group: Group, deliveries: Sequence[Delivery], lease_thread: LeaseThread) -> list[HandlingResult]:
    results: list[HandlingResult] = []
    for delivery in deliveries:
        if results and (results[-1].outcome is Outcome.RELEASED or results[-1].ends_with):
            results.append(RELEASED)
        elif lease_thread.stop.is_set():
            results += defer(group, [(delivery, Deferral.unhandled(Reason.STOP, delivery))])
        else:
            results.append(handle(group, delivery, lease_thread))
    return results


def ignore(group: Group, deliveries: Sequence[Delivery]) -> list[HandlingResult]:
    """Ignore deliveries that no live process of the group subscribes to, and defer those of another release of its code."""
    with own_statements(), guarded_transaction(group.using):
        for_others = subscriptions.ignore(group, deliveries)
    results = [IGNORED] * len(deliveries)
    places = sorted(for_others)
    others = [(deliveries[place], Deferral.unhandled(Reason.NO_HANDLER, deliveries[place])) for place in places]
    for place, result in zip(places, defer(group, others), strict=True):
        results[place] = result
    return results


def defer(
    group: Group, deferrals: Sequence[tuple[Delivery, Deferral]], error: BaseException | None = None
) -> list[HandlingResult]:
    """
    Store deliveries as deferred messages, so that they can be acknowledged; those that the group knows are dropped.

    Where the database is away or refuses them, they are released. Never raises an `Exception`.

    Args:
        error: what their handler raised, for the log of failed deliveries.
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
                        record_failure(DeliveryInfo.of(delivery), failed_as(deferral), error, using)
            break
        except Exception as trouble:
            is_last = number == LOCK_TRIES - 1
            if is_last or not (isinstance(trouble, psycopg.errors.LockNotAvailable) or is_conflict(trouble)):
                return report_refused([delivery for delivery, _ in deferrals], trouble)
    results = []
    for (delivery, deferral), is_new in zip(deferrals, are_new, strict=True):
        if is_new and error is not None:
            tell(delivery, deferral, error)
        outcome = Outcome.DEAD_LETTER if deferral.is_dead else Outcome.DEFERRED
        results.append(HandlingResult(outcome, order_key_of(delivery), error is not None) if is_new else DUPLICATE)
    return results


def failed_as(deferral: Deferral) -> str:
    return "dead letter" if deferral.is_dead else "retry"


def report_refused(deliveries: Sequence[Delivery], trouble: Exception) -> list[HandlingResult]:
    """Return the results of deliveries about which nothing could be written."""
    is_told = isinstance(trouble, DatabaseError | psycopg.Error)
    logger.warning(
        "Message %s could not be deferred, and is delivered again: %s",
        ", ".join(delivery.message_id for delivery in deliveries),
        str(trouble).strip(),
        exc_info=None if is_told else trouble,
        extra=fields_of(*deliveries),
    )
    refused = InboxRefused(str(trouble).strip()) if database.refuses_all(trouble) else None
    return [replace(RELEASED, ends_with=refused)] * len(deliveries)


def _after_error(run: HandlerRun, delivery: Delivery, error: BaseException, before: Any) -> HandlingResult:
    """Defer the only delivery of a run that raised an error; release it if the database is to blame."""
    if isinstance(error, InboxRefused):
        return replace(RELEASED, ends_with=error)
    if is_outage(error, before):
        logger.warning("Message %s is delivered again: %s", delivery.message_id, describe(error), extra=fields_of(delivery))
        return RELEASED
    try:
        database.drop_if_lost(run.group.using)
    except Exception as trouble:
        return report_refused([delivery], trouble)[0]
    return defer(run.group, [(delivery, judge(run.group, run.consumer, delivery, error))], error)[0]


def _handle_claimed(run: HandlerRun, consumer: Consumer) -> list[HandlingResult]:
    """Handle first deliveries of one handler in a transaction; those that others have, or that are not next, are deferred."""
    messages = [read(consumer, delivery) for delivery in run.deliveries]
    entries = [InboxEntry.of(delivery, consumer, message) for message, delivery in zip(messages, run.deliveries, strict=True)]
    failpoint("consumer.before_handler")
    with guarded_transaction(consumer.using):  # what returns is acknowledged
        run.note_commit()
        with own_statements():
            run.claims = [claim(entries[0], consumer.using)] if len(entries) == 1 else claim_many(entries, consumer.using)
            for entry, claimed in zip(entries, run.claims, strict=True):
                if claimed is Claim.KNOWN:
                    drop(entry, consumer.using)
        mine = [place for place, claimed in enumerate(run.claims) if claimed is Claim.MINE]
        if mine:
            contexts = [context_of(run.deliveries[place], entries[place].key, 0) for place in mine]
            run.call(consumer, [messages[place] for place in mine], contexts)
        failpoint("consumer.after_handler")
    tracing.note_handled(consumer.group, [run.deliveries[place] for place in mine])
    failpoint("consumer.after_commit")
    return _results_of(run)


def _results_of(run: HandlerRun) -> list[HandlingResult]:
    """Return the results of a committed run; messages that were not claimed are deferred."""
    ends = {Claim.MINE: HANDLED, Claim.KNOWN: DUPLICATE}
    reasons = {Claim.BUSY: Reason.ELSEWHERE, Claim.BEHIND: Reason.BEHIND}
    left = [
        (delivery, Deferral.unhandled(reasons[claimed], delivery))
        for delivery, claimed in zip(run.deliveries, run.claims, strict=True)
        if claimed in reasons
    ]
    others = iter(defer(run.group, left))
    return [ends.get(claimed) or next(others) for claimed in run.claims]


def _results_despite(run: HandlerRun, error: BaseException) -> list[HandlingResult]:
    """Return the results of a run that is committed despite an error, or interrupted by the end of the process; else none."""
    ends_with = run.end_of_process(error)
    if run.is_committed:
        run.report_callback(error)
        return [replace(result, ends_with=ends_with) for result in _results_of(run)]
    if ends_with is None:
        return []
    stopped = [(delivery, Deferral.unhandled(Reason.STOP, delivery)) for delivery in run.deliveries]
    return [replace(result, ends_with=ends_with) for result in defer(run.group, stopped)]

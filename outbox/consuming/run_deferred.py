"""
Run deferred messages, each in one transaction.

The row's lock is the lease, the handler runs behind a savepoint, and its failure is written under the same lock. Only where the
transaction is gone (the connection was lost, the COMMIT refused, a conflict) is the end of a run written by itself; then its
token decides whether it counts.
"""

from __future__ import annotations

from datetime import timedelta

from django.db import connections, transaction
from msgspec.structs import replace

from outbox import database, tracing
from outbox.consuming import deferred
from outbox.consuming.deferred import CRASH_LIMIT, Deferral, Reason, Taken
from outbox.consuming.delivery_info import DeliveryInfo, context_of, fields_of
from outbox.consuming.failures import describe, record_failure
from outbox.consuming.handle import failed_as, report_refused
from outbox.consuming.handler import HandlerRun, is_outage, own_statements
from outbox.consuming.inbox import InboxEntry, drop, idle_limit
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.outcome import DUPLICATE, HANDLED, RELEASED, HandlingResult, Outcome, is_conflict, judge, tell
from outbox.consuming.read import find_consumer, read
from outbox.consuming.register import Consumer, Group
from outbox.database.guarded import guarded_transaction
from outbox.errors import InboxRefused, NeverEnded
from outbox.failpoints import FailpointReached, failpoint
from outbox.logs import get_logger

logger = get_logger(__name__)

SOON = timedelta(seconds=1)  # for a message that another process still handles
WAITS = HandlingResult(Outcome.DEFERRED)


def run_deferred(group: Group, taken: Taken, lease_thread: LeaseThread) -> HandlingResult:
    """
    Run a deferred message whose run was begun by `deferred.take`.

    RELEASED: the end of the run could not be written, since the database is away; `deferred.end_late` writes it later.
    """
    run = HandlerRun(group, [taken.delivery], lease_thread)
    before = connections[group.using].connection
    try:
        run.consumer = find_consumer(group, taken.delivery)
        if taken.crashes >= CRASH_LIMIT:
            raise NeverEnded(
                f"begun {taken.crashes} times, never ended: the process was killed or froze while its handler ran, or the "
                "handler ran beyond its time_limit"
            )
        if run.consumer is None:  # the code was loaded anew
            return _end(run, taken, Deferral(Reason.NO_HANDLER, SOON, taken.failures))
        result = _handle(run, run.consumer, taken)
    except FailpointReached:
        raise
    except BaseException as error:
        result = _after_error(run, taken, error, before)
    if taken.order_key and result.outcome in (Outcome.HANDLED, Outcome.DUPLICATE, Outcome.DEAD_LETTER):
        deferred.wake_next(taken.order_key, group.using)
    return result


def _handle(run: HandlerRun, consumer: Consumer, taken: Taken) -> HandlingResult:
    delivery, using = taken.delivery, consumer.using
    message = read(consumer, delivery)
    entry = InboxEntry.of(delivery, consumer, message)
    failpoint("consumer.before_handler")
    with guarded_transaction(using):
        run.note_commit()
        with own_statements():
            is_free = deferred.lease(taken, None if entry.key == taken.idempotency_key else entry.key, idle_limit(using), using)
            if is_free is False:
                deferred.undo_begin(taken, SOON, using)
        if not is_free:
            return WAITS
        try:
            with transaction.atomic(using=using):
                with own_statements():
                    is_new = deferred.claim_deferred(taken, entry.arrival, entry.key, using)
                    if not is_new:
                        drop(entry, using)
                if is_new:
                    run.call(consumer, [message], [context_of(delivery, entry.key, taken.failures)])
        except (FailpointReached, InboxRefused):
            raise
        except BaseException as error:
            if is_conflict(error) or run.end_of_process(error) or not _is_alive(using):
                raise
            return _write_end(run, taken, error)
        failpoint("consumer.after_handler")
    if is_new:
        tracing.note_handled(consumer.group, [delivery])
    failpoint("consumer.after_commit")
    return HANDLED if is_new else DUPLICATE


def _is_alive(using: str) -> bool:
    """Return whether the transaction goes on after the savepoint was rolled back."""
    wrapper = connections[using]
    return wrapper.connection is not None and not wrapper.connection.closed and not wrapper.needs_rollback


def _after_error(run: HandlerRun, taken: Taken, error: BaseException, before: object) -> HandlingResult:
    """Return the result of a run whose transaction is gone, and write its end where the database is there."""
    ends_with = run.end_of_process(error)
    if run.is_committed:
        run.report_callback(error)
        result = HANDLED
    elif ends_with:
        result = _end(run, taken, Deferral(Reason.STOP, failures=taken.failures))
    elif isinstance(error, InboxRefused) or is_outage(error, before):
        logger.warning("Message %s is run again: %s", taken.delivery.message_id, describe(error), extra=fields_of(taken.delivery))
        return replace(RELEASED, ends_with=error if isinstance(error, InboxRefused) else None)
    else:
        result = _end(run, taken, error)
    return replace(result, ends_with=ends_with)


def _end(run: HandlerRun, taken: Taken, cause: BaseException | Deferral) -> HandlingResult:
    """Write the end of a run in a transaction of its own."""
    using = run.group.using
    try:
        database.drop_if_lost(using)
        with deferred.own_transaction(using):
            if isinstance(cause, BaseException):
                return _write_end(run, taken, cause)
            deferred.end(taken, cause, using)
    except Exception as trouble:
        return report_refused([taken.delivery], trouble)[0]
    return WAITS


def _write_end(run: HandlerRun, taken: Taken, error: BaseException) -> HandlingResult:
    """Write the end of a run that raised an error, in the open transaction."""
    delivery, using = taken.delivery, run.group.using
    deferral = judge(run.group, run.consumer, delivery, error, failures=taken.failures, runs=taken.runs)
    if deferred.end(taken, deferral, using):
        record_failure(DeliveryInfo.of(delivery), failed_as(deferral), error, using)
        tell(delivery, deferral, error)
    return HandlingResult(Outcome.DEAD_LETTER) if deferral.is_dead else WAITS

"""
Run deferred messages, each in one transaction. See `deferred.py` for the table and its statements.

The lock of the message's row is the lease of the run. The handler runs within a savepoint; if it fails, the savepoint is rolled
back, and the failure is written before the lock is released. If the whole transaction is lost (the connection was lost, the
COMMIT was refused, or there was a conflict), the end of the run is written in another transaction. If another process has taken
the message since, that write has no effect.
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
from outbox.consuming.handle import failure_outcome, report_unrecorded
from outbox.consuming.handler import HandlerRun, inbox_statements, is_outage
from outbox.consuming.inbox import InboxEntry, drop, idle_limit
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.outcome import (
    DUPLICATE,
    HANDLED,
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
from outbox.errors import InboxRefused, NeverEnded
from outbox.failpoints import FailpointReached, failpoint
from outbox.logs import get_logger

logger = get_logger(__name__)

SOON = timedelta(seconds=1)  # the delay until a next run, if this run did not call the handler (another process holds a lock)
DEFERRED = HandlingResult(Outcome.DEFERRED)


def run_deferred(group: Group, taken: Taken, lease_thread: LeaseThread) -> HandlingResult:
    """
    Run a deferred message whose run was begun by `deferred.take`.

    The result is RELEASED if the end of the run could not be written, since the database is unavailable. Then the caller has to
    record the end later, with `deferred.end_late`.
    """
    run = HandlerRun(group, [taken.delivery], lease_thread)
    connection_before = connections[group.using].connection
    try:
        run.consumer = find_consumer(group, taken.delivery)
        if taken.crashes >= CRASH_LIMIT:
            raise NeverEnded(
                f"begun {taken.crashes} times, never ended: the process was killed or froze while its handler ran, or the "
                "handler ran beyond its time_limit"
            )
        if run.consumer is None:  # the handlers have changed since the worker read its subscriptions
            return _end(run, taken, Deferral(Reason.NO_HANDLER, SOON, taken.failures))
        result = _handle(run, run.consumer, taken)
    except FailpointReached:
        raise
    except BaseException as error:
        result = _after_error(run, taken, error, connection_before)
    if taken.order_key and result.outcome in (Outcome.HANDLED, Outcome.DUPLICATE, Outcome.DEAD_LETTER):
        deferred.wake_next(taken.order_key, group.using)
    return result


def _handle(run: HandlerRun, consumer: Consumer, taken: Taken) -> HandlingResult:
    delivery, using = taken.delivery, consumer.using
    message = read(consumer, delivery)
    entry = InboxEntry.of(delivery, consumer, message)
    failpoint("consumer.before_handler")
    with guarded_transaction(using):
        run.watch_commit()
        with inbox_statements():
            is_free = deferred.lease(taken, None if entry.key == taken.idempotency_key else entry.key, idle_limit(using), using)
            if is_free is False:
                deferred.undo_begin(taken, SOON, using)
        if not is_free:
            return DEFERRED
        failure: BaseException | None = None
        try:
            with transaction.atomic(using=using):
                with inbox_statements():
                    is_new = deferred.claim_deferred(taken, entry.arrival, entry.key, using)
                    if not is_new:
                        drop(entry, using)
                if is_new:
                    run.call(consumer, [message], [context_of(delivery, entry.key, taken.failures)])
        except (FailpointReached, InboxRefused):
            raise
        except BaseException as error:
            if is_conflict(error) or run.error_at_shutdown(error) or not _is_alive(using):
                raise
            failure, end = error, _write_end(run, taken, error)
        failpoint("consumer.after_handler")
    if failure is not None:
        return _report_end(taken, failure, *end)
    if is_new:
        tracing.record_handled(consumer.group, [delivery])
    failpoint("consumer.after_commit")
    return HANDLED if is_new else DUPLICATE


def _is_alive(using: str) -> bool:
    """Return whether the outer transaction is still usable, after the handler's savepoint was rolled back."""
    wrapper = connections[using]
    return wrapper.connection is not None and not wrapper.connection.closed and not wrapper.needs_rollback


def _after_error(run: HandlerRun, taken: Taken, error: BaseException, connection_before: object) -> HandlingResult:
    """Return the result of a run after an error left its transaction; write the end of the run, if that is still necessary."""
    error_to_raise = run.error_at_shutdown(error)
    if run.is_committed:
        run.report_callback(error)
        result = HANDLED
    elif error_to_raise:
        result = _end(run, taken, Deferral(Reason.STOP, failures=taken.failures))
    elif isinstance(error, InboxRefused) or is_outage(error, connection_before):
        text = "Message %s was not handled, since the database failed; it is run again: %s"
        logger.warning(text, taken.delivery.message_id, describe(error), extra=fields_of(taken.delivery))
        return replace(RELEASED, error_to_raise=error if isinstance(error, InboxRefused) else None)
    else:
        result = _end(run, taken, error)
    return replace(result, error_to_raise=error_to_raise)


def _end(run: HandlerRun, taken: Taken, cause: BaseException | Deferral) -> HandlingResult:
    """Write the end of a run in another transaction: as `cause` says, or as `decide_deferral` decides after an error."""
    using = run.group.using
    try:
        database.drop_if_lost(using)
        with deferred.own_transaction(using):
            if isinstance(cause, Deferral):
                deferred.end(taken, cause, using)
                return DEFERRED
            end = _write_end(run, taken, cause)
    except Exception as write_error:
        return report_unrecorded([taken.delivery], write_error)[0]
    return _report_end(taken, cause, *end)


def _write_end(run: HandlerRun, taken: Taken, error: BaseException) -> tuple[Deferral, bool]:
    """Write the end and failure of a run that raised an error, in the current transaction; False if the run is over already."""
    delivery, using = taken.delivery, run.group.using
    deferral = decide_deferral(run.group, run.consumer, delivery, error, failures=taken.failures, runs=taken.runs)
    is_written = deferred.end(taken, deferral, using)
    if is_written:
        record_failure(DeliveryInfo.of(delivery), failure_outcome(deferral), error, using)
    return deferral, is_written


def _report_end(taken: Taken, error: BaseException, deferral: Deferral, is_written: bool) -> HandlingResult:
    """Report a failed run. Call this after the commit of its end, since a signal's receiver may break a transaction."""
    if is_written:
        report_failure(taken.delivery, deferral, error)
    return HandlingResult(Outcome.DEAD_LETTER) if deferral.is_dead else DEFERRED

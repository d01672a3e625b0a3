"""The outcome of deliveries, and what is counted after a failure. Source: docs/explanation/deliveries.md."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

import psycopg
from django.db import Error as DatabaseError

from outbox import conf, database, signals
from outbox.brokers.base import Delivery
from outbox.consuming import failure, failure_counts, subscriptions
from outbox.consuming.delivery_info import DeliveryInfo, fields_of
from outbox.consuming.register import Consumer, Group, Retry
from outbox.database.outermost import outermost_transaction
from outbox.errors import InboxRefused, NeverEnded, Reject, RetryLater, UnknownMessageType, UnreadableBody
from outbox.logs import get_logger

logger = get_logger(__name__)

# For messages whose code may be deployed soon: retries from a minute to two hours apart, about 9 hours in all.
WAIT_FOR_CODE = Retry(limit=16, delays=conf.RETRY_DELAYS[4:])

# For outages and conflicts of the database, which are not failures of the handler. The last delay is used for all further ones.
OUTAGE_DELAYS = tuple(timedelta(seconds=seconds) for seconds in (1, 2, 5, 10, 30))
AFTER_OUTAGE = timedelta(seconds=5)
CONFLICT_DELAYS = tuple(timedelta(seconds=seconds) for seconds in (0.1, 0.5, 1, 5))
CONFLICTS = {"40001", "40P01"}  # serialization_failure, deadlock_detected

LONGEST_WAIT = timedelta(days=365)  # later dates may be out of the database's range


class Outcome(enum.StrEnum):
    """The outcome of a delivery. The first three are acknowledged."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"  # the group had handled it before
    IGNORED = "ignored"  # no live process of the group has a handler for it
    RETRY = "retry"
    HANDED_BACK = "handed back"  # by a worker that did not call the handler, or whose handler could not finish
    DEAD_LETTER = "dead letter"


@dataclass(frozen=True, slots=True)
class HandlingResult:
    """
    Args:
        after: with RETRY and HANDED_BACK, deliver it again after that time.
        reason: with DEAD_LETTER, why; with RETRY, why the message blocks its key.
        is_outage: the database went away; the handler is not to blame.
        is_for_others: another process of the group has a handler for the message, and this one has none.
        is_busy: another process handles the message now. The broker delivers it again when INVISIBLE is over.
        ends_with: the exception that the worker raises when the delivery is settled.
    """

    outcome: Outcome
    after: timedelta = timedelta(0)
    reason: str = ""
    is_outage: bool = False
    is_for_others: bool = False
    is_busy: bool = False
    ends_with: BaseException | None = None


HANDLED = HandlingResult(Outcome.HANDLED)
FOR_ANOTHER = HandlingResult(Outcome.HANDED_BACK, after=timedelta(seconds=1), is_for_others=True)
NOT_NOW = HandlingResult(Outcome.HANDED_BACK, after=timedelta(seconds=1))  # another worker may have it now, or this one soon
BUSY = HandlingResult(Outcome.HANDED_BACK, is_busy=True)


def judge(
    group: Group, consumer: Consumer | None, delivery: Delivery, error: BaseException, *, worker: str, is_outage: bool
) -> HandlingResult:
    """Decide the outcome of a delivery whose handling raised an error, and record the failure. Never raises."""
    arrival = DeliveryInfo.of(delivery)
    has_id = bool(delivery.message_id)  # else nothing may be concluded from what was decided about another one
    try:
        database.drop_if_lost(group.using)
        if consumer is None and isinstance(error, UnknownMessageType) and subscriptions.has_subscriber(group, delivery):
            return FOR_ANOTHER
        with outermost_transaction(group.using):
            failure_counts.wait_for_nobody(group.using)
            # of another copy, or before this one could be read
            if has_id and (decided := failure_counts.decided(arrival, group.using)):
                return as_decided(decided)
            if is_outage or is_conflict(error):
                result = _again_uncounted(delivery, is_outage=is_outage)
            else:
                result = _count(group, consumer, delivery, arrival, error, worker)
            if delivery.delivery_count > 1:
                failure_counts.end(arrival, worker, group.using, most_crashes=_most_crashes(result, error))
            if result.outcome is Outcome.DEAD_LETTER and has_id:
                failure_counts.decide(arrival, group.using, given_up=result.reason)
            failure.record(arrival, result.outcome, error, group.using)
    except Exception as trouble:
        is_told = isinstance(trouble, DatabaseError | psycopg.Error)
        text = "Message %s: its failure could not be recorded, and is not counted: %s"
        logger.warning(
            text, delivery.message_id, str(trouble).strip(), exc_info=None if is_told else trouble, extra=fields_of(delivery)
        )
        refused = InboxRefused(str(trouble).strip()) if database.refuses_all(trouble) else None
        result = replace(_again_uncounted(delivery, is_outage=True), ends_with=refused)
    _log(delivery, result, error)
    if result.outcome is Outcome.RETRY and result.reason:
        _alert_blocked(group, delivery, result.reason)
    return result


def not_counted(delivery: Delivery, error: InboxRefused) -> HandlingResult:
    """Return the result of a delivery whose handler was not called, because the database refuses the inbox."""
    return replace(_again_uncounted(delivery, is_outage=True), ends_with=error)


def as_decided(decided: failure_counts.Decided) -> HandlingResult:
    """Return the result of a message about which something is decided already. It counts nothing."""
    if decided.has_letter:
        return HandlingResult(Outcome.DUPLICATE)
    if decided.given_up:
        return HandlingResult(Outcome.DEAD_LETTER, reason=decided.given_up)
    return HandlingResult(Outcome.HANDED_BACK, after=decided.early or timedelta())


def _most_crashes(result: HandlingResult, error: BaseException) -> int:
    """Return how many crashes stay counted. A message that blocks its key has to be run again, so one less than the limit."""
    is_blocked = result.outcome is Outcome.RETRY and isinstance(error, NeverEnded)
    return failure_counts.CRASH_LIMIT - is_blocked


def _again_uncounted(delivery: Delivery, *, is_outage: bool) -> HandlingResult:
    delays = OUTAGE_DELAYS if is_outage else CONFLICT_DELAYS
    after = Retry(delays=delays).delay(delivery.delivery_count)
    if (
        is_outage and delivery.delivery_count > 1
    ):  # when the database is back, this worker first records that the handler has ended
        after = max(after, AFTER_OUTAGE)
    return HandlingResult(Outcome.RETRY, after=after, is_outage=is_outage)


def _count(
    group: Group, consumer: Consumer | None, delivery: Delivery, arrival: DeliveryInfo, error: BaseException, worker: str
) -> HandlingResult:
    """Count the failure, if it is one, and return the outcome."""
    if isinstance(error, RetryLater):
        return HandlingResult(Outcome.RETRY, after=max(timedelta(0), min(error.after, LONGEST_WAIT)))
    if isinstance(error, Reject):
        return HandlingResult(Outcome.DEAD_LETTER, reason=failure.text_of(error) or "rejected by its handler")
    policy = WAIT_FOR_CODE if consumer is None or isinstance(error, UnknownMessageType) else consumer.retry
    if isinstance(error, NeverEnded | UnreadableBody):
        reason = failure.text_of(error)
    else:
        failures = failure_counts.count_failure(arrival, worker, group.using)
        if _is_worth_a_retry(error, policy) and policy.allows(failures):
            result = HandlingResult(Outcome.RETRY, after=policy.delay(failures))
            failure_counts.decide(arrival, group.using, after=result.after)
            return result
        reason = f"failed {failures} {'time' if failures == 1 else 'times'}, last: {failure.describe(error)}"
    if _blocks(group, consumer, delivery):
        failure_counts.decide(arrival, group.using, after=policy.delays[-1])
        return HandlingResult(Outcome.RETRY, after=policy.delays[-1], reason=reason)
    return HandlingResult(Outcome.DEAD_LETTER, reason=reason)


def _is_worth_a_retry(error: BaseException, policy: Retry) -> bool:
    """Return whether a policy retries an error. A `BaseException` such as `SystemExit` is treated as an `Exception`."""
    return isinstance(error, policy.on) or (not isinstance(error, Exception) and Exception in policy.on)


def is_conflict(error: BaseException) -> bool:
    """Return whether the database aborted the transaction because of a conflict with another one."""
    return any(getattr(one, "sqlstate", None) in CONFLICTS for one in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and contexts, and the members of exception groups, each once."""
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        yield one
        todo += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def _blocks(group: Group, consumer: Consumer | None, delivery: Delivery) -> bool:
    """Return whether a message that cannot be handled blocks the later ones of its key."""
    concerned = [consumer] if consumer else [one for one in group.consumers.values() if one.topic == delivery.topic]
    return any(one.ordered and one.on_dead == "block" for one in concerned)


def _alert_blocked(group: Group, delivery: Delivery, reason: str) -> None:
    text = (
        f"Message {delivery.message_id} cannot be handled ({reason}); in topic {delivery.topic!r} it holds back all later "
        f"messages of the key {delivery.key!r} from group {group.name!r}. Correct the handler, or have it raise Reject for "
        "this message."
    )
    logger.error(text, extra=fields_of(delivery))
    signals.alert.send_robust(
        sender=Consumer,
        reason=text,
        details={"group": group.name, "message_id": delivery.message_id, "topic": delivery.topic},
    )


def _log(delivery: Delivery, result: HandlingResult, error: BaseException) -> None:
    """Log a failed delivery, with a traceback if the error is new to this process or the message becomes a dead letter."""
    is_last = result.outcome is Outcome.DEAD_LETTER
    is_told = isinstance(error, RetryLater | Reject)  # the handler says all there is to say
    is_traced = not is_told and (failure.is_new(error) or is_last)
    logger.log(
        logging.ERROR if is_last else logging.WARNING,
        "Message %s on topic %r, delivery %s to group %r: %s. %s",
        delivery.message_id,
        delivery.topic,
        delivery.delivery_count,
        delivery.group,
        "given up" if is_last else f"retry in {result.after.total_seconds():.1f} s",
        failure.describe(error),
        exc_info=error if is_traced else None,
        extra=fields_of(delivery),
    )

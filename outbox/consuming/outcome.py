"""
The outcome of a delivery, or of a run of a deferred message. After an error, `decide_deferral` decides what happens next.

Two numbers count against a message: *failures* of its handler, and *crashes*, which are runs that were begun and never ended. The
broker's number of deliveries does not count, since deployments, outages and slow handlers of other messages also cause
deliveries; but a message that is deferred at a redelivery begins with one crash. Source: docs/explanation/deliveries.md.
"""

from __future__ import annotations

import enum
import logging
from datetime import timedelta
from functools import partial

import msgspec

from outbox import conf, signals
from outbox.brokers.base import Delivery
from outbox.consuming.deferred import CRASH_LIMIT, Deferral, Reason
from outbox.consuming.delivery_info import fields_of
from outbox.consuming.failures import causes, describe, fingerprint, is_new_error, text_of
from outbox.consuming.register import Consumer, Group, RetryPolicy
from outbox.errors import NeverEnded, Reject, RetryLater, UnknownMessageType, UnreadableBody
from outbox.logs import get_logger

logger = get_logger(__name__)

# The retries of a message whose type or version this process has no code for. The code may be deployed soon, so there are 16
# retries at intervals of a minute to two hours, about 9 hours in all.
RETRY_FOR_CODE = RetryPolicy(limit=16, delays=conf.RETRY_DELAYS[4:])

# The delays before retries after a conflict with another transaction, which is no failure of the handler. The last one repeats.
CONFLICT_DELAYS = tuple(timedelta(seconds=seconds) for seconds in (0.1, 0.5, 1, 5))
CONFLICTS = {"40001", "40P01"}  # serialization_failure, deadlock_detected

MAX_DELAY = timedelta(days=365)  # longest delay after RetryLater; much longer ones would exceed the database's range of dates


class Outcome(enum.StrEnum):
    """The outcome of a delivery, or of a run of a deferred message. A worker acknowledges deliveries except RELEASED ones."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"  # the group has handled, discarded or deferred the message before
    IGNORED = "ignored"  # no live process of the group has a handler for the message
    DEFERRED = "deferred"
    DEAD_LETTER = "dead letter"  # stored, and run again only if an operator replays it
    RELEASED = "released"  # nothing could be written (database unavailable, or refuses it); it is delivered or run again


class HandlingResult(msgspec.Struct, frozen=True):
    """
    The result of handling a delivery, or of running a deferred message.

    Args:
        order_key: the order key of a newly deferred message; the worker defers later messages of this key, too. Otherwise None.
        is_failure: the message was newly deferred because of an error.
        error_to_raise: the exception that the worker has to raise after it has settled the delivery; None if there is none.
    """

    outcome: Outcome
    order_key: str | None = None
    is_failure: bool = False
    error_to_raise: BaseException | None = None


HANDLED = HandlingResult(Outcome.HANDLED)
DUPLICATE = HandlingResult(Outcome.DUPLICATE)
IGNORED = HandlingResult(Outcome.IGNORED)
RELEASED = HandlingResult(Outcome.RELEASED)


def decide_deferral(
    group: Group, consumer: Consumer | None, delivery: Delivery, error: BaseException, *, failures: int = 0, runs: int = 1
) -> Deferral:
    """
    Decide whether a message is retried after an error, and when, or becomes a dead letter.

    Args:
        consumer: the message's handler; None if it has none, or the error occurred before its handler was known.
        failures: how often the handler has failed with the message before.
        runs: how often the message was run, including this time; the delay after a conflict depends on it.
    """
    make_deferral = partial(Deferral, failures=failures, error=describe(error), fingerprint=fingerprint(error))
    if isinstance(error, RetryLater):
        return make_deferral(Reason.FAILED, max(timedelta(0), min(error.after, MAX_DELAY)))
    if is_conflict(error):
        return make_deferral(Reason.FAILED, RetryPolicy(delays=CONFLICT_DELAYS).delay(runs))
    if isinstance(error, Reject):
        return make_deferral(Reason.FAILED, is_dead=True, error=text_of(error) or "rejected by its handler")
    if consumer is None and isinstance(error, UnknownMessageType):
        return make_deferral(Reason.NO_HANDLER, crashes=int(delivery.delivery_count > 1))
    policy = RETRY_FOR_CODE if consumer is None or isinstance(error, UnknownMessageType) else consumer.retry
    if isinstance(error, NeverEnded | UnreadableBody):
        make_deferral = partial(make_deferral, error=text_of(error))
    else:
        make_deferral = partial(make_deferral, failures=failures + 1)
        is_exit = not isinstance(error, Exception) and Exception in policy.on  # `on=(Exception,)` also covers SystemExit
        if (is_exit or isinstance(error, policy.on)) and policy.allows(failures + 1):
            return make_deferral(Reason.FAILED, policy.delay(failures + 1))
    handlers = [consumer] if consumer else [other for other in group.consumers.values() if other.topic == delivery.topic]
    if not any(other.is_ordered and other.on_dead == "block" for other in handlers):
        return make_deferral(Reason.FAILED, is_dead=True)
    crashes = CRASH_LIMIT - 1 if isinstance(error, NeverEnded) else 0  # one below the limit, so that the message is run again
    return make_deferral(Reason.FAILED, policy.delays[-1], crashes=crashes, is_blocking=True)


def is_conflict(error: BaseException) -> bool:
    """Return whether the database aborted the transaction because of a conflict with another one."""
    return any(getattr(cause, "sqlstate", None) in CONFLICTS for cause in causes(error))


def report_failure(delivery: Delivery, deferral: Deferral, error: BaseException) -> None:
    """
    Log a failed delivery, with a traceback if the error is new to this process or the message becomes a dead letter.

    Also send `signals.dead_lettered` if the message becomes a dead letter, and `signals.alert` if it blocks its key.
    """
    is_explained = isinstance(error, RetryLater | Reject)  # raised by the handler on purpose, so no traceback is needed
    is_traced = not is_explained and (is_new_error(error) or deferral.is_dead)
    logger.log(
        logging.ERROR if deferral.is_dead else logging.WARNING,
        "Message %s on topic %r, delivery %s to group %r: %s. %s",
        delivery.message_id,
        delivery.topic,
        delivery.delivery_count,
        delivery.group,
        "dead letter" if deferral.is_dead else f"retry in {deferral.after.total_seconds():.1f} s",
        describe(error),
        exc_info=error if is_traced else None,
        extra=fields_of(delivery),
    )
    details = {"group": delivery.group, "message_id": delivery.message_id, "topic": delivery.topic}
    if deferral.is_dead:
        signals.dead_lettered.send_robust(sender=Consumer, reason=deferral.error, **details)
    if deferral.is_blocking:
        text = (
            f"Message {delivery.message_id} cannot be handled ({deferral.error}); in topic {delivery.topic!r} it holds back all "
            f"later messages of the key {delivery.key!r} from group {delivery.group!r}. Correct the cause, or discard "
            "the message with outbox_replay --discard."
        )
        logger.error(text, extra=fields_of(delivery))
        signals.alert.send_robust(sender=Consumer, reason=text, details=details)

"""
The outcome of a delivery, or of a run of a deferred message; after an error, `judge` decides it.

Two things are counted of a deferred message: failures of its handler, and crashes, which are runs that were begun and of which no
end is known. The broker's count of deliveries brings no message closer to its limit: deployments, outages and slow handlers of
other messages cause deliveries too. Source: docs/explanation/deliveries.md.
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

# The pauses of messages of a newer version, whose code may be deployed soon: 16 retries, a minute to two hours apart, about
# 9 hours in all.
RETRY_FOR_CODE = RetryPolicy(limit=16, delays=conf.RETRY_DELAYS[4:])

# The pauses after conflicts of the database, which are not failures of the handler. The last delay is used for all further ones.
CONFLICT_DELAYS = tuple(timedelta(seconds=seconds) for seconds in (0.1, 0.5, 1, 5))
CONFLICTS = {"40001", "40P01"}  # serialization_failure, deadlock_detected

LONGEST_WAIT = timedelta(days=365)  # later dates may be out of the database's range


class Outcome(enum.StrEnum):
    """The outcome of a delivery. After all but the last one, a worker acknowledges it."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"  # the group knew it before
    IGNORED = "ignored"  # no live process of the group has a handler for it
    DEFERRED = "deferred"
    DEAD_LETTER = "dead letter"  # deferred, and not run again by itself
    RELEASED = "released"  # the database is away, so nothing could be written


class HandlingResult(msgspec.Struct, frozen=True):
    """
    Args:
        order_key: the key whose later messages have to be deferred, too; None for all others.
        is_failure: its handler failed.
        ends_with: the exception that the worker raises when the delivery is settled.
    """

    outcome: Outcome
    order_key: str | None = None
    is_failure: bool = False
    ends_with: BaseException | None = None


HANDLED = HandlingResult(Outcome.HANDLED)
DUPLICATE = HandlingResult(Outcome.DUPLICATE)
IGNORED = HandlingResult(Outcome.IGNORED)
RELEASED = HandlingResult(Outcome.RELEASED)


def judge(
    group: Group, consumer: Consumer | None, delivery: Delivery, error: BaseException, *, failures: int = 0, runs: int = 1
) -> Deferral:
    """
    Decide what becomes of a message after an error.

    Args:
        consumer: its handler; None where there is none, or it was not looked for.
        failures: how often the handler has raised before.
        runs: how often the message was run, this time included.
    """
    told = partial(Deferral, failures=failures, error=describe(error), fingerprint=fingerprint(error))
    if isinstance(error, RetryLater):
        return told(Reason.FAILED, max(timedelta(0), min(error.after, LONGEST_WAIT)))
    if is_conflict(error):
        return told(Reason.FAILED, RetryPolicy(delays=CONFLICT_DELAYS).delay(runs))
    if isinstance(error, Reject):
        return told(Reason.FAILED, is_dead=True, error=text_of(error) or "rejected by its handler")
    if consumer is None and isinstance(error, UnknownMessageType):
        return told(Reason.NO_HANDLER, crashes=int(delivery.delivery_count > 1))
    policy = RETRY_FOR_CODE if consumer is None or isinstance(error, UnknownMessageType) else consumer.retry
    if isinstance(error, NeverEnded | UnreadableBody):
        told = partial(told, error=text_of(error))
    else:
        told = partial(told, failures=failures + 1)
        is_exit = not isinstance(error, Exception) and Exception in policy.on  # SystemExit in a handler is one of its errors
        if (is_exit or isinstance(error, policy.on)) and policy.allows(failures + 1):
            return told(Reason.FAILED, policy.delay(failures + 1))
    concerned = [consumer] if consumer else [other for other in group.consumers.values() if other.topic == delivery.topic]
    if not any(other.is_ordered and other.on_dead == "block" for other in concerned):
        return told(Reason.FAILED, is_dead=True)
    crashes = CRASH_LIMIT - 1 if isinstance(error, NeverEnded) else 0  # it has to be run again
    return told(Reason.FAILED, policy.delays[-1], crashes=crashes, is_blocking=True)


def is_conflict(error: BaseException) -> bool:
    """Return whether the database aborted the transaction because of a conflict with another one."""
    return any(getattr(cause, "sqlstate", None) in CONFLICTS for cause in causes(error))


def tell(delivery: Delivery, deferral: Deferral, error: BaseException) -> None:
    """
    Log a failed delivery, with a traceback if the error is new to this process or the message becomes a dead letter.

    Receivers of `signals.dead_lettered`, and of `signals.alert` where it blocks its key, are called.
    """
    is_told = isinstance(error, RetryLater | Reject)  # the handler says all there is to say
    is_traced = not is_told and (is_new_error(error) or deferral.is_dead)
    logger.log(
        logging.ERROR if deferral.is_dead else logging.WARNING,
        "Message %s on topic %r, delivery %s to group %r: %s. %s",
        delivery.message_id,
        delivery.topic,
        delivery.delivery_count,
        delivery.group,
        "given up" if deferral.is_dead else f"retry in {deferral.after.total_seconds():.1f} s",
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
            f"later messages of the key {delivery.key!r} from group {delivery.group!r}. Correct the handler, or have it raise "
            "Reject for this message."
        )
        logger.error(text, extra=fields_of(delivery))
        signals.alert.send_robust(sender=Consumer, reason=text, details=details)

"""
What becomes of a delivery: acknowledged, retried, handed back, or a dead letter. `judge` decides it after a failure.

Two things are counted of a message in a group: failures of its handler, and crashes, which are runs that were begun and never
ended. The broker's count of deliveries brings no message closer to its limit: deployments, outages and slow handlers of other
messages cause deliveries too. A first delivery needs no statement here. Source: docs/explanation/deliveries.md.

What was decided after a failure is written with its count. So a message that comes back before its delay is over, because the
broker did not take the retry or the process died, is handed back and counts nothing; and one that was given up is not handled
again, though its dead letter could not be stored.

A process handles one message at a time whose last run was begun and never ended. If it kills the process, no other is
interrupted. Otherwise messages that were interrupted together would come back together, and be interrupted again.
"""

from __future__ import annotations

import enum
import logging
import site
import sysconfig
import threading
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import UUID

import psycopg
from django.db import Error as DatabaseError
from django.db import connections

import outbox
from outbox import conf, database, signals
from outbox.brokers.base import Delivery
from outbox.consuming import subscriptions
from outbox.consuming.delivery_info import DeliveryInfo, fields_of
from outbox.consuming.register import Consumer, Group, Retry
from outbox.database.guarded import guarded_transaction
from outbox.database.locks import Lock
from outbox.errors import InboxRefused, NeverEnded, Reject, RetryLater, UnknownMessageType, UnreadableBody
from outbox.logs import cut, cut_traceback, get_logger, safe_text, storable, without_numbers
from outbox.models import Duplicate, FailedDelivery, Inbox

logger = get_logger(__name__)

# For messages whose code may be deployed soon: retries from a minute to two hours apart, about 9 hours in all.
WAIT_FOR_CODE = Retry(limit=16, delays=conf.RETRY_DELAYS[4:])

# For outages and conflicts of the database, which are not failures of the handler. The last delay is used for all further ones.
OUTAGE_DELAYS = tuple(timedelta(seconds=seconds) for seconds in (1, 2, 5, 10, 30))
AFTER_OUTAGE = timedelta(seconds=5)
CONFLICT_DELAYS = tuple(timedelta(seconds=seconds) for seconds in (0.1, 0.5, 1, 5))
CONFLICTS = {"40001", "40P01"}  # serialization_failure, deadlock_detected

LONGEST_WAIT = timedelta(days=365)  # later dates may be out of the database's range

CRASH_LIMIT = 5
EARLY = timedelta(seconds=0.1)  # a message may come so much before its delay is over, by a broker's own clock

EXCLUDES_SECONDS = 60.0  # a run that takes longer is slow or stuck, and no longer keeps others waiting

_at_work: list[tuple[UUID, float]] = []  # messages that `alone` is about, and since when
_change = threading.Lock()

MAX_FINGERPRINT_CHARACTERS = 200
MAX_REMEMBERED = 1_000

_NOT_THE_USERS = tuple(
    f"{Path(folder).resolve()}/"
    for folder in {
        *site.getsitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        *outbox.__path__,
    }
)

_met: dict[str, None] = {}  # fingerprints, the latest one last
_meeting = threading.Lock()

Parameters = dict[str, Any] | list[Any]


class Outcome(enum.StrEnum):
    """The outcome of a delivery. After the first three, a worker acknowledges it."""

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
        with guarded_transaction(group.using):
            limit_lock_waits(group.using)
            if consumer is None and isinstance(error, UnknownMessageType) and subscriptions.has_subscriber(group, delivery):
                return for_another(delivery, group.using)
            # of another copy, or before this one could be read
            if has_id and (decided := read_decision(arrival, group.using)):
                return as_decided(decided)
            if is_outage or is_conflict(error):
                result = _again_uncounted(delivery, is_outage=is_outage)
            else:
                result = _count(group, consumer, delivery, arrival, error, worker)
            if delivery.delivery_count > 1:
                end_run(arrival, worker, group.using, most_crashes=_most_crashes(result, error))
            if result.outcome is Outcome.DEAD_LETTER and has_id:
                record_decision(arrival, group.using, given_up=result.reason)
            record_failure(arrival, result.outcome, error, group.using)
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


def for_another(delivery: Delivery, using: str) -> HandlingResult:
    """
    Return the result of a message that another process of the group has a handler for.

    What the group has handled or given up ends here. Kafka delivers such messages again, in a partition whose messages need the
    code of several releases: if each had to go to a process with its handler, no process could end them all.
    """
    if not delivery.message_id:
        return FOR_ANOTHER  # nothing may be concluded from another message without an id
    arrival = DeliveryInfo.of(delivery)
    if (decided := read_decision(arrival, using)) and decided.given_up:
        return as_decided(decided)
    handled = Inbox.objects.using(using).filter(
        consumer_group=arrival.group, message_id=arrival.message_id, topic=arrival.topic, delivery_count__gt=0
    )
    if handled.exists():
        record_duplicate(arrival, using)
        return HandlingResult(Outcome.DUPLICATE)
    return FOR_ANOTHER


def record_duplicate(arrival: DeliveryInfo, using: str) -> None:
    """Record that a delivery is dropped as a duplicate."""
    Duplicate.objects.using(using).create(
        consumer_group=arrival.group,
        message_id=arrival.message_id,
        topic=arrival.topic,
        delivery_count=arrival.delivery_count,
    )


def as_decided(decided: Decided) -> HandlingResult:
    """Return the result of a message about which something is decided already. It counts nothing."""
    if decided.has_letter:
        return HandlingResult(Outcome.DUPLICATE)
    if decided.given_up:
        return HandlingResult(Outcome.DEAD_LETTER, reason=decided.given_up)
    return HandlingResult(Outcome.HANDED_BACK, after=decided.early or timedelta())


def _most_crashes(result: HandlingResult, error: BaseException) -> int:
    """Return how many crashes stay counted. A message that blocks its key has to be run again, so one less than the limit."""
    is_blocked = result.outcome is Outcome.RETRY and isinstance(error, NeverEnded)
    return CRASH_LIMIT - is_blocked


def _again_uncounted(delivery: Delivery, *, is_outage: bool) -> HandlingResult:
    delays = OUTAGE_DELAYS if is_outage else CONFLICT_DELAYS
    after = Retry(delays=delays).delay(delivery.delivery_count)
    if is_outage and delivery.delivery_count > 1:
        after = max(after, AFTER_OUTAGE)  # when the database is back, this worker first records that the handler has ended
    return HandlingResult(Outcome.RETRY, after=after, is_outage=is_outage)


def _count(
    group: Group, consumer: Consumer | None, delivery: Delivery, arrival: DeliveryInfo, error: BaseException, worker: str
) -> HandlingResult:
    """Count the failure, if it is one, and return the outcome."""
    if isinstance(error, RetryLater):
        return HandlingResult(Outcome.RETRY, after=max(timedelta(0), min(error.after, LONGEST_WAIT)))
    if isinstance(error, Reject):
        return HandlingResult(Outcome.DEAD_LETTER, reason=text_of(error) or "rejected by its handler")
    policy = WAIT_FOR_CODE if consumer is None or isinstance(error, UnknownMessageType) else consumer.retry
    if isinstance(error, NeverEnded | UnreadableBody):
        reason = text_of(error)
    else:
        failures = count_failure(arrival, worker, group.using)
        if _is_worth_a_retry(error, policy) and policy.allows(failures):
            result = HandlingResult(Outcome.RETRY, after=policy.delay(failures))
            record_decision(arrival, group.using, after=result.after)
            return result
        reason = f"failed {failures} {'time' if failures == 1 else 'times'}, last: {describe(error)}"
    if _blocks(group, consumer, delivery):
        record_decision(arrival, group.using, after=policy.delays[-1])
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
    is_traced = not is_told and (is_new_error(error) or is_last)
    logger.log(
        logging.ERROR if is_last else logging.WARNING,
        "Message %s on topic %r, delivery %s to group %r: %s. %s",
        delivery.message_id,
        delivery.topic,
        delivery.delivery_count,
        delivery.group,
        "given up" if is_last else f"retry in {result.after.total_seconds():.1f} s",
        describe(error),
        exc_info=error if is_traced else None,
        extra=fields_of(delivery),
    )


DECIDED = """
SELECT greatest(due_at - clock_timestamp(), interval '0') AS early, given_up, has_letter FROM outbox_failure_count
WHERE consumer_group = %(group)s AND message_id = %(message_id)s AND (given_up <> '' OR due_at > clock_timestamp() + %(early)s)
"""

# A run of the handler begins, unless another process handles the message now, its delay is not over, or the group gave it up. One
# that was begun before and has not ended counts as a crash. Committed before the handler begins, so that it is known when the
# process is killed.
BEGIN = f"""
WITH l AS MATERIALIZED (SELECT pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s || ' ' || %(key)s)) AS is_free
), decided AS MATERIALIZED ({DECIDED}), begun AS (
    INSERT INTO outbox_failure_count AS t (consumer_group, message_id, topic, begun_at, begun_by)
    SELECT %(group)s, %(message_id)s, %(topic)s, clock_timestamp(), %(worker)s FROM l
    WHERE is_free AND NOT EXISTS (SELECT FROM decided)
    ON CONFLICT (consumer_group, message_id) DO UPDATE SET crashes = t.crashes + (t.begun_at IS NOT NULL)::int,
        begun_at = excluded.begun_at, begun_by = excluded.begun_by, changed_at = clock_timestamp()
    RETURNING failures, crashes
)
SELECT failures, crashes, early, given_up, has_letter FROM begun FULL JOIN decided ON true
"""

COUNT_FAILURE = """
INSERT INTO outbox_failure_count AS t (consumer_group, message_id, topic, failures)
VALUES (%(group)s, %(message_id)s, %(topic)s, 1)
ON CONFLICT (consumer_group, message_id) DO UPDATE SET failures = t.failures + 1, changed_at = clock_timestamp(),
    begun_at = CASE WHEN t.begun_by <> %(worker)s THEN t.begun_at END
RETURNING failures
"""

DECIDE = """
INSERT INTO outbox_failure_count (consumer_group, message_id, topic, due_at, given_up, has_letter)
VALUES (%(group)s, %(message_id)s, %(topic)s, clock_timestamp() + %(after)s, %(given_up)s, %(has_letter)s)
ON CONFLICT (consumer_group, message_id) DO UPDATE SET due_at = excluded.due_at, given_up = excluded.given_up,
    has_letter = excluded.has_letter, changed_at = clock_timestamp()
"""

END = """
UPDATE outbox_failure_count SET begun_at = NULL, crashes = least(crashes, %(most_crashes)s), changed_at = clock_timestamp()
WHERE consumer_group = %(group)s AND message_id = %(message_id)s AND begun_by = %(worker)s
"""

END_OF_WORKER = "UPDATE outbox_failure_count SET begun_at = NULL WHERE begun_by = %s AND begun_at IS NOT NULL"

FORGET = "DELETE FROM outbox_failure_count WHERE consumer_group = %s AND message_id = ANY(%s)"

UNENDED = """
SELECT message_id FROM outbox_failure_count WHERE consumer_group = %s AND message_id = ANY(%s) AND begun_at IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Begun:
    """The counts at the beginning of a run."""

    failures: int
    crashes: int


@dataclass(frozen=True, slots=True)
class Decided:
    """
    What was decided after the last failure of a message, and is not done yet.

    Args:
        early: the rest of its delay. None: it has none.
        given_up: why the group gave it up; "" if it did not.
        has_letter: whether the broker has stored its dead letter.
    """

    early: timedelta | None
    given_up: str
    has_letter: bool


def begin_run(arrival: DeliveryInfo, key: str, worker: str, using: str) -> Begun | Decided | None:
    """Record that a run of the handler begins, unless its message has to wait; None: another process handles it."""
    rows = _rows(using, BEGIN, {**arrival.as_parameters(), "key": key, "worker": worker, "early": EARLY})
    if not rows:
        return None
    failures, crashes, *decision = rows[0]
    return Begun(failures, crashes) if failures is not None else Decided(*decision)


def read_decision(arrival: DeliveryInfo, using: str) -> Decided | None:
    """Return what was decided about a message, if that is not done yet."""
    rows = _rows(using, DECIDED, {**arrival.as_parameters(), "early": EARLY})
    return Decided(*rows[0]) if rows else None


def count_failure(arrival: DeliveryInfo, worker: str, using: str) -> int:
    """Count a failure, which ends the worker's run; return the number of failures."""
    [(failures,)] = _rows(using, COUNT_FAILURE, {**arrival.as_parameters(), "worker": worker})
    return int(failures)


def record_decision(
    arrival: DeliveryInfo, using: str, *, after: timedelta = timedelta(), given_up: str = "", has_letter: bool = False
) -> None:
    """Record when a message that failed is due again, or why the group gives it up, and whether its dead letter is stored."""
    _execute(using, DECIDE, {**arrival.as_parameters(), "after": after, "given_up": given_up, "has_letter": has_letter})


def end_run(arrival: DeliveryInfo, worker: str, using: str, *, most_crashes: int = CRASH_LIMIT) -> None:
    """Record that a worker's run has ended, unless another worker has begun one since."""
    _execute(using, END, {**arrival.as_parameters(), "worker": worker, "most_crashes": most_crashes})


def limit_lock_waits(using: str) -> None:
    """Set the transaction's lock timeout to one second: a statement that waits for another process's handler fails."""
    _execute(using, "SELECT set_config('lock_timeout', '1s', true)", [])


def end_runs_of(worker: str, using: str) -> None:
    """Record that all runs of a worker have ended, after an outage in which that could not be recorded."""
    _execute(using, END_OF_WORKER, [worker])


def forget_counts(group: str, message_ids: Collection[UUID], using: str) -> None:
    """Delete the counts of messages."""
    _execute(using, FORGET, [group, list(message_ids)])


def unended_runs(group: str, message_ids: Collection[UUID], using: str) -> set[UUID]:
    """Return the messages whose last run has not ended."""
    return {message_id for (message_id,) in _rows(using, UNENDED, [group, list(message_ids)])}


def _execute(using: str, statement: str, values: Parameters) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute(statement, values)


def _rows(using: str, statement: str, values: Parameters) -> list[tuple[Any, ...]]:
    with connections[using].cursor() as cursor:
        cursor.execute(statement, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


@contextmanager
def alone(message_id: UUID) -> Iterator[bool]:
    """Yield whether this process handles no other such message while the block runs; a stuck run of the same does not count."""
    me = message_id, time.monotonic()
    with _change:
        is_alone = all(one == message_id or me[1] - since > EXCLUDES_SECONDS for one, since in _at_work)
        if is_alone:
            _at_work.append(me)
    try:
        yield is_alone
    finally:
        if is_alone:
            with _change:
                _at_work.remove(me)


def record_failure(arrival: DeliveryInfo, outcome: str, error: BaseException, using: str) -> None:
    """Record a failed delivery, in the caller's transaction."""
    FailedDelivery.objects.using(using).create(
        consumer_group=arrival.group,
        message_id=arrival.message_id,
        topic=arrival.topic,
        delivery_count=arrival.delivery_count,
        source=arrival.source,
        lane=arrival.lane,
        number=arrival.number,
        outcome=outcome,
        fingerprint=fingerprint(error),
        error=describe(error),
        traceback=storable(cut_traceback("".join(traceback.format_exception(error)))),
    )


def is_new_error(error: BaseException) -> bool:
    """Return whether this process has not seen a similar error among its last thousand."""
    looks = fingerprint(error)
    with _meeting:
        was_met = looks in _met
        _met.pop(looks, None)
        _met[looks] = None
        if len(_met) > MAX_REMEMBERED:
            del _met[next(iter(_met))]
    return not was_met


def text_of(error: BaseException) -> str:
    """Return an error's text in a form that PostgreSQL can store; a note where its `__str__` raises."""
    return storable(cut(safe_text(error)))


def describe(error: BaseException) -> str:
    """Return an error for operators: its type, then its text."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def fingerprint(error: BaseException) -> str:
    """Return a string that is equal for similar errors: type, place in the user's code, text without numbers."""
    words = shape_of(cut(safe_text(error)))
    return cut(storable(f"{type(error).__name__} in {_place(error.__traceback__)}: {words}"), MAX_FINGERPRINT_CHARACTERS)


def shape_of(text: str) -> str:
    """Return the beginning of the first line of a text, with `#` for each id and number in it."""
    return cut(without_numbers(text.partition("\n")[0]), MAX_FINGERPRINT_CHARACTERS)


def _place(trace: TracebackType | None) -> str:
    """Return the innermost function of the user's code, without its line number, which changes with each edit."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(_NOT_THE_USERS)]
    if not frames:
        return "no frame"
    innermost = (own or frames)[-1]
    return f"{innermost.f_globals.get('__name__', '?')}.{innermost.f_code.co_qualname}"

"""
Handle deliveries: everything that happens in the database. `worker.py` settles them at the broker.

The inbox: a group handles a message once. The row is inserted first, in the handler's own transaction, together with an
advisory lock that is held until the transaction ends. A second delivery of the message in the meantime finds the lock taken;
it does not wait, and comes again later. A timeout for idle transactions ends the one of a frozen process.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any, Self

import psycopg
from django.db import Error as DatabaseError
from django.db import OperationalError, connections, transaction
from psycopg.pq import TransactionStatus

from outbox import conf, database, tracing
from outbox.brokers.base import Delivery
from outbox.consuming import outcome, subscriptions
from outbox.consuming.delivery_info import Context, DeliveryInfo, columns_of, context_of, dedupe_key_of, fields_of, require_id
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.outcome import (
    BUSY,
    CRASH_LIMIT,
    HANDLED,
    NOT_NOW,
    Begun,
    Decided,
    HandlingResult,
    Outcome,
    alone,
    as_decided,
    causes,
    describe,
    is_conflict,
    judge,
    not_counted,
)
from outbox.consuming.read import find_consumer, read
from outbox.consuming.register import Consumer, Group
from outbox.database.guarded import as_innermost, guarded_transaction
from outbox.database.locks import Lock
from outbox.errors import BrokenTransaction, ClosedByHandler, InboxRefused, NeverEnded, NotOutermost
from outbox.failpoints import FailpointReached, failpoint
from outbox.logs import get_logger
from outbox.message import Cause, Header, TopicType, current_cause
from outbox.shutdown import handler_runs, is_shutdown
from outbox.unawaited import awaiting_all

IDLE_SHARE = 0.75  # of INVISIBLE; the lease thread sends a statement in each quarter

# Nothing is written where the group has handled the key, where another process handles it now, or where another process handles a
# message with the same key of an ordered topic (`order`, NULL elsewhere). Sets the timeout of the idle transaction to `idle`,
# unless the database has a setting for it.
CLAIM = f"""
WITH l AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || %(key)s::text)) AS is_mine,
        %(order)s::text IS NULL OR pg_try_advisory_xact_lock({Lock.ORDER}, hashtext(%(order)s::text)) AS is_next,
        CASE WHEN %(idle)s::text IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'
            THEN set_config('idle_in_transaction_session_timeout', %(idle)s::text, true) END
), i AS (
    INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number, delivery_count)
    SELECT %(group)s::text, %(key)s::text, %(message_id)s::uuid, %(source)s::text, %(topic)s::text, %(lane)s::smallint,
        %(number)s::bigint, %(delivery_count)s::int
    FROM l WHERE is_mine AND is_next
    ON CONFLICT (consumer_group, dedupe_key) DO NOTHING
    RETURNING 1
)
SELECT is_mine, is_next, EXISTS (SELECT FROM i) FROM l
"""

# The same for many messages of topics without order.
CLAIM_MANY = f"""
WITH l AS MATERIALIZED (
    SELECT g.*, pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || key)) AS is_mine
    FROM unnest(%(keys)s::text[], %(message_ids)s::uuid[], %(sources)s::text[], %(topics)s::text[], %(lanes)s::smallint[],
        %(numbers)s::bigint[], %(delivery_counts)s::int[])
        WITH ORDINALITY g (key, message_id, source, topic, lane, number, delivery_count, place)
), t AS MATERIALIZED (
    SELECT CASE WHEN %(idle)s::text IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'
        THEN set_config('idle_in_transaction_session_timeout', %(idle)s::text, true) END
), i AS (
    INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number, delivery_count)
    SELECT %(group)s::text, key, message_id, source, topic, lane, number, delivery_count FROM l WHERE is_mine
    ON CONFLICT (consumer_group, dedupe_key) DO NOTHING
    RETURNING dedupe_key, message_id
)
SELECT is_mine, i.message_id IS NOT NULL
FROM t, l LEFT JOIN i ON i.dedupe_key = l.key AND i.message_id = l.message_id ORDER BY place
"""

# Another message was handled under the same dedupe key: record that the number of this one has arrived too.
ARRIVED_TOO = """
INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number)
SELECT %(group)s, %(message_id)s::text, %(message_id)s, %(source)s, %(topic)s, %(lane)s::smallint, %(number)s::bigint
WHERE NOT EXISTS (
    SELECT FROM outbox_inbox
    WHERE consumer_group = %(group)s AND dedupe_key = %(key)s AND message_id = %(message_id)s
)
ON CONFLICT (consumer_group, dedupe_key) DO NOTHING
"""


class Claim(enum.Enum):
    """The result of a claim."""

    MINE = enum.auto()
    HANDLED = enum.auto()  # by an earlier delivery
    BUSY = enum.auto()  # another process handles it now
    BEHIND = enum.auto()  # another process handles a message of its key, on an ordered topic


@dataclass(frozen=True, slots=True)
class InboxEntry:
    """
    A message that a group is about to handle.

    Args:
        key: identifies duplicates: the message id, or the handler's own dedupe key.
        order_key: the key on an ordered topic; None on others.
    """

    arrival: DeliveryInfo
    key: str
    order_key: str | None = None

    @classmethod
    def of(cls, delivery: Delivery, key: str) -> Self:
        """Return the entry of a delivery."""
        is_ordered = bool(delivery.key) and conf.topic_settings(delivery.topic).type is TopicType.FIFO
        order_key = f"{delivery.group} {delivery.topic} {delivery.key}" if is_ordered else None
        return cls(DeliveryInfo.of(delivery), key, order_key)


def claim(entry: InboxEntry, using: str) -> Claim:
    """
    Insert the inbox row in the caller's transaction, and limit its idle time to less than `INVISIBLE`.

    So the transaction has ended when the message is delivered again. The transaction around a test is not limited.
    """
    values = {**entry.arrival.as_parameters(), "key": entry.key, "order": entry.order_key, "idle": _idle(using)}
    cursor = database.kept_cursor(using, CLAIM)
    cursor.execute(CLAIM, values)
    is_mine, is_next, is_new = cursor.cursor.fetchone()  # the result is here already: there is no database error to translate
    if not is_mine:
        return Claim.BUSY
    if not is_next:
        return Claim.BEHIND
    return Claim.MINE if is_new else Claim.HANDLED


def claim_many(entries: Sequence[InboxEntry], using: str) -> list[Claim]:
    """Insert inbox rows as `claim` does, in one statement. Of several entries with one key, only one can be MINE."""
    columns = columns_of([entry.arrival for entry in entries])
    keys = [entry.key for entry in entries]
    with database.bound_cursor(using) as cursor:
        cursor.execute(CLAIM_MANY, {"group": entries[0].arrival.group, "keys": keys, "idle": _idle(using), **columns})
        rows = cursor.fetchall()
    claims, seen = [], set()
    for entry, (is_mine, is_new) in zip(entries, rows, strict=True):
        name = (entry.key, entry.arrival.message_id)  # the row names the message that it was written for
        is_copy = name in seen
        seen.add(name)
        claims.append(Claim.BUSY if not is_mine else Claim.MINE if is_new and not is_copy else Claim.HANDLED)
    return claims


def _idle(using: str) -> str | None:
    """Return how many milliseconds the transaction may be idle; None inside the transaction of a test."""
    if len(connections[using].atomic_blocks) > 1:
        return None
    return _idle_within(conf.settings().consumer.invisible)


@cache
def _idle_within(invisible: timedelta) -> str:
    return str(int(max(1, invisible * IDLE_SHARE // timedelta(milliseconds=1))))


def drop(entry: InboxEntry, using: str) -> None:
    """Record that a delivery was dropped as a duplicate."""
    outcome.record_duplicate(entry.arrival, using)
    with connections[using].cursor() as cursor:
        cursor.execute(ARRIVED_TOO, {**entry.arrival.as_parameters(), "key": entry.key})


logger = get_logger(__name__)

DURABLE_IS_NESTED = "A durable atomic block cannot be nested"  # Django's words


@dataclass(slots=True)
class _Run:
    """A handler's run with one message, or several at once. Its fields are also valid after an exception."""

    group: Group
    deliveries: Sequence[Delivery]
    lease_thread: LeaseThread
    consumer: Consumer | None = None
    results: list[HandlingResult] = field(default_factory=list)  # of each delivery; complete before the commit
    is_committed: bool = False


def handle(group: Group, delivery: Delivery, lease_thread: LeaseThread | None = None) -> HandlingResult:
    """
    Handle a message once: inbox row, the handler's writes and the messages it publishes commit together.

    Exceptions of the handler, and a message that cannot be decoded, result in an outcome; they are not raised.
    """
    if lease_thread is None:
        with closing(LeaseThread()) as own:
            return handle(group, delivery, own)
    one = _Run(group, [delivery], lease_thread)
    before = connections[group.using].connection
    try:
        require_id(delivery)
        one.consumer = find_consumer(group, delivery)
        if one.consumer is None:
            return ignore(group, [delivery])[0]
        _apply(one, one.consumer)
    except FailpointReached:
        raise
    except BaseException as error:
        if results := _results_despite(one, error):
            return results[0]
        if isinstance(error, InboxRefused):
            return not_counted(delivery, error)
        return judge(group, one.consumer, delivery, error, worker=lease_thread.worker, is_outage=_is_outage(error, before))
    return one.results[0]


def handle_together(group: Group, deliveries: Sequence[Delivery], lease_thread: LeaseThread) -> list[HandlingResult]:
    """
    Handle first deliveries of a handler with a batch size in one transaction; each alone where that fails.
    """
    one = _Run(group, deliveries, lease_thread)
    try:
        for delivery in deliveries:
            require_id(delivery)
        one.consumer = find_consumer(group, deliveries[0])
        if one.consumer is not None:
            _apply(one, one.consumer)
            return one.results
    except FailpointReached:
        raise
    except BaseException as error:
        if results := _results_despite(one, error):
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
        last = results[-1] if results else None
        if lease_thread.stop.is_set() or (last and (last.is_outage or last.ends_with)):
            results.append(HandlingResult(Outcome.HANDED_BACK, is_outage=bool(last and last.is_outage)))
        else:
            results.append(handle(group, delivery, lease_thread))
    return results


def ignore(group: Group, deliveries: Sequence[Delivery]) -> list[HandlingResult]:
    """
    Ignore deliveries that no live process of the group subscribes to; hand back those of another release of its code, unless the
    group has handled them or given them up.
    """
    with _own_statements(), guarded_transaction(group.using):
        for_others = subscriptions.ignore(group, deliveries)
        return [
            outcome.for_another(delivery, group.using) if place in for_others else HandlingResult(Outcome.IGNORED)
            for place, delivery in enumerate(deliveries)
        ]


def _apply(one: _Run, consumer: Consumer) -> None:
    messages = [read(consumer, delivery) for delivery in one.deliveries]
    entries = [
        InboxEntry.of(delivery, _dedupe_key(consumer, message, delivery))
        for message, delivery in zip(messages, one.deliveries, strict=True)
    ]
    if one.deliveries[0].delivery_count == 1:
        _apply_begun(one, consumer, messages, entries, failures=0)
        return
    begun = _begin(one, consumer, entries[0])
    if begun is None:
        one.results = [BUSY]
        return
    if isinstance(begun, Decided):
        one.results = [as_decided(begun)]
        return
    with alone(entries[0].arrival.message_id) if begun.crashes else nullcontext(True) as is_alone:
        if is_alone:
            _apply_begun(one, consumer, messages, entries, failures=begun.failures)
            return
    with guarded_transaction(consumer.using):
        outcome.end_run(entries[0].arrival, one.lease_thread.worker, consumer.using)
    one.results = [NOT_NOW]


def _apply_begun(one: _Run, consumer: Consumer, messages: list[Any], entries: list[InboxEntry], *, failures: int) -> None:
    failpoint("consumer.before_handler")
    connection = connections[consumer.using]
    with guarded_transaction(consumer.using):  # what returns is acknowledged
        if len(connection.atomic_blocks) == 1:  # a test's own transaction is not committed
            transaction.on_commit(lambda: setattr(one, "is_committed", True), using=consumer.using)
        with _own_statements():
            claims = _claim(entries, consumer.using)
            one.results = [
                _result_of(claim, entry, consumer, one.lease_thread.worker) for claim, entry in zip(claims, entries, strict=True)
            ]
        mine = [place for place, claim in enumerate(claims) if claim is Claim.MINE]
        if mine:
            contexts = [context_of(one.deliveries[place], entries[place].key, failures) for place in mine]
            with (
                one.lease_thread.handler_at_work(connection.connection, consumer),
                tracing.process(consumer.group, one.deliveries),
            ):
                _call(consumer, [messages[place] for place in mine], contexts)
            _check_transaction(consumer)
        failpoint("consumer.after_handler")
    tracing.note_handled(consumer.group, [one.deliveries[place] for place in mine])
    failpoint("consumer.after_commit")


@contextmanager
def _own_statements() -> Iterator[None]:
    """Raise `InboxRefused` where the database refuses a statement of the inbox: no handler is to blame."""
    try:
        yield
    except DatabaseError as error:
        if database.refuses_all(error):
            raise InboxRefused(str(error).strip()) from error
        raise


def _claim(entries: list[InboxEntry], using: str) -> list[Claim]:
    if len(entries) > 1:
        return claim_many(entries, using)
    entry = entries[0]
    found = claim(entry, using)
    if entry.arrival.delivery_count > 1 and found in (Claim.MINE, Claim.HANDLED):
        outcome.forget_counts(entry.arrival.group, [entry.arrival.message_id], using)
    return [found]


def _begin(one: _Run, consumer: Consumer, entry: InboxEntry) -> Begun | Decided | None:
    """
    Record the beginning of another run, as `outcome.begin_run`.

    Raises:
        NeverEnded: too many runs were begun and never ended.
    """
    with _own_statements(), guarded_transaction(consumer.using):
        begun = outcome.begin_run(entry.arrival, entry.key, one.lease_thread.worker, consumer.using)
    if isinstance(begun, Begun) and begun.crashes >= CRASH_LIMIT:
        raise NeverEnded(
            f"begun {begun.crashes} times, never ended: the process was killed or froze while {consumer.name} handled the "
            "message, or the handler ran beyond its time_limit"
        )
    return begun


def _result_of(claim: Claim, entry: InboxEntry, consumer: Consumer, worker: str) -> HandlingResult:
    if claim is Claim.MINE:
        return HANDLED
    if claim is Claim.HANDLED:
        drop(entry, consumer.using)
        return HandlingResult(Outcome.DUPLICATE)
    if entry.arrival.delivery_count > 1:
        outcome.end_run(entry.arrival, worker, consumer.using)
    if claim is Claim.BEHIND:
        return NOT_NOW
    return BUSY


def _dedupe_key(consumer: Consumer, message: object, delivery: Delivery) -> str:
    own = consumer.dedupe(message) if consumer.dedupe else None
    # The subject keeps the keys of a group's handlers apart from each other, and from message ids.
    if own is not None:
        return f"{consumer.subject}:{own}"
    return dedupe_key_of(delivery.message_id, delivery.headers.get(Header.SOURCE, ""))


def _call(consumer: Consumer, messages: list[Any], contexts: list[Context]) -> None:
    one = contexts[0]
    correlation_id = one.headers.get(Header.CORRELATION_ID) or one.message_id
    cause = Cause(one.message_id, correlation_id, one.headers.get(Header.TRACEPARENT, ""))
    before = current_cause.set(cause if len(contexts) == 1 else None)
    try:
        with as_innermost(consumer.using), handler_runs(), awaiting_all():
            result = consumer.handler(messages, contexts) if consumer.batch_size else consumer.handler(messages[0], one)
    except RuntimeError as error:
        if DURABLE_IS_NESTED not in str(error):
            raise
        raise NotOutermost(
            f"{consumer.name} entered atomic(durable=True), but a handler runs inside the transaction that commits its inbox "
            "row.",
            hint="Use atomic() there: what the handler writes is committed when it returns. Work that has to be committed by "
            "itself goes into a message of its own, which the handler publishes.",
        ) from error
    finally:
        current_cause.reset(before)
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(
            f"{consumer.name} returned a coroutine, but is not marked as a coroutine function, so it was not awaited. Put "
            "@consumer right above `async def`, or mark the wrapper with asgiref.sync.markcoroutinefunction()."
        )


def _check_transaction(consumer: Consumer) -> None:
    """Raise where the commit would silently be a rollback, in Django or in PostgreSQL."""
    connection = connections[consumer.using]
    status = connection.connection.pgconn.transaction_status if connection.connection else TransactionStatus.UNKNOWN
    if connection.needs_rollback or status != TransactionStatus.INTRANS:
        error = BrokenTransaction if not connection.closed_in_transaction else ClosedByHandler
        raise error(
            f"{consumer.name} returned with a broken transaction: it caught an error of the database, or of an atomic "
            "block, that had aborted the transaction. Put the statement that may fail into an atomic() of its own, "
            "and catch the error outside of it."
        )


def _is_outage(error: BaseException, before: Any) -> bool:
    """Return whether the database caused an error, not the handler: the connection from before is closed."""
    if isinstance(error, ClosedByHandler):
        return False
    if before is None:  # it could not be opened, or was at its first statement
        return isinstance(error, OperationalError | psycopg.OperationalError) and not is_conflict(error)
    return before.closed and any(isinstance(one, DatabaseError | psycopg.Error | BrokenTransaction) for one in causes(error))


def _results_despite(one: _Run, error: BaseException) -> list[HandlingResult]:
    """Return the results of a run that is committed despite an error, or interrupted by the end of the process; else none."""
    ends = is_shutdown(error, is_requested=one.lease_thread.stop.is_set())
    if one.is_committed:
        ids = ", ".join(delivery.message_id for delivery in one.deliveries)
        logger.error(
            "Message %s was handled, but a callback after its commit failed.",
            ids,
            exc_info=error,
            extra=fields_of(*one.deliveries),
        )
        return [replace(result, ends_with=error if ends else None) for result in one.results]
    return [_hand_back(one, error)] * len(one.deliveries) if ends else []


def _hand_back(one: _Run, error: BaseException) -> HandlingResult:
    """Hand back deliveries that were interrupted by the end of the worker."""
    try:
        with guarded_transaction(one.group.using):
            for delivery in one.deliveries:
                if delivery.delivery_count > 1:
                    outcome.end_run(DeliveryInfo.of(delivery), one.lease_thread.worker, one.group.using)
    except Exception:
        text = "Message %s: the end of its run could not be recorded."
        logger.warning(text, one.deliveries[0].message_id, exc_info=True, extra=fields_of(one.deliveries[0]))
    return HandlingResult(Outcome.HANDED_BACK, ends_with=error)

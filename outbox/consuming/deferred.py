"""
Deferred messages, which a group has stored in its database to handle later: the table's statements, and the steps of a run.

A message that a group could not handle at its first delivery is stored in `outbox_deferred`, and only then acknowledged, so that
the broker need not deliver it again. A message *has ended* when it has an inbox row: it was handled, ignored or discarded. It is
*known* if it has a row in `outbox_deferred` or in the inbox. A deferred row is deleted only in or after the transaction that
inserts the message's inbox row, so a known message stays known. Therefore a message may be acknowledged if and only if it is
known, and the broker may deliver it at any time and any number of times. Source: docs/explanation/deliveries.md.

A deferred message is run in two transactions. The first records the beginning of the run (TAKE), so that the record remains if
the run kills its process. The second locks the row, and the handler runs within a savepoint of it; this lock is the lease of the
run. A failure of the handler is written before the lock is released. The column `runs` counts the runs of a message, and each
write about a run requires its number. So after another process has taken the message, writes about the older run change nothing.
"""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
from django.db import connections, transaction
from msgspec.structs import asdict

from outbox import database
from outbox.brokers.base import Delivery
from outbox.consuming.delivery_info import DeliveryInfo, idempotency_key_of, order_key_of
from outbox.consuming.subscriptions import SEPARATOR
from outbox.database import Connection
from outbox.database.guarded import guarded_transaction
from outbox.database.locks import Lock
from outbox.logs import storable
from outbox.message import Header

HELD = datetime(9999, 1, 1, tzinfo=UTC)  # `due_at` of a message that an operator holds
SLICE_BYTES = 64 * 1024 * 1024  # of bodies, about that many in a statement: PostgreSQL refuses one of a gigabyte
CRASH_LIMIT = 5  # after this number of runs without a recorded end, the message is not run again, but fails with `NeverEnded`


class Reason(enum.StrEnum):
    """Why a message was deferred."""

    FAILED = "failed"  # its handler raised, or it cannot be read
    AGAIN = "again"  # it was redelivered, and may have killed the process that received it before
    BEHIND = "behind"  # an earlier message of its key is deferred, or is being handled
    ELSEWHERE = "elsewhere"  # another process is handling it, or a message with the same idempotency key
    NO_HANDLER = "no handler"  # this process has no handler for it, but another live one has; or no module here defines its type
    STOP = "stop"  # the worker was stopped
    SLOW = "slow"  # it waited while a slow handler ran with an earlier message
    SERVER = "server"  # the server moved the message to its dead-letter queue
    LOST = "lost"  # it was lost on the way to the group, and an operator sent it again


class Deferral(msgspec.Struct, frozen=True):
    """
    The columns that are written about a message when it is deferred, and at the end of each run that does not end it.

    Args:
        after: how long after the write the message is due.
        failures: how often its handler has raised an error.
        crashes: how often it may have killed a process.
        is_dead: the message is a dead letter: it is run again only if an operator replays it.
        is_blocking: the message cannot be handled, and keeps later messages of its key from being handled.
        error, fingerprint: text and fingerprint of the last error; an empty error leaves both columns of the row unchanged.
    """

    reason: Reason
    after: timedelta = timedelta()
    failures: int = 0
    crashes: int = 0
    is_dead: bool = False
    is_blocking: bool = False
    error: str = ""
    fingerprint: str = ""

    @classmethod
    def unhandled(cls, reason: Reason, delivery: Delivery) -> Deferral:
        """
        Return the deferral of a delivery whose handler was not called here.

        It counts one crash if the message was delivered before, since it may have killed the process that received it.
        """
        return cls(reason, crashes=int(delivery.delivery_count > 1))


class Taken(msgspec.Struct, frozen=True):
    """
    A deferred message whose run has begun.

    Args:
        runs: the number of this run; writes about the run must match it.
        crashes: the number of earlier runs whose end is not recorded, and of redeliveries that may have killed a process.
    """

    delivery: Delivery
    id: int
    runs: int
    crashes: int
    failures: int
    message_id: UUID
    idempotency_key: str
    order_key: str | None

    @property
    def type(self) -> str:
        """The name of its message type."""
        return self.delivery.headers.get(Header.TYPE, "")


SETTINGS = ("SET LOCAL transaction_isolation = 'read committed'", "SET LOCAL lock_timeout = '1s'")

# No other message of the order key is deferred (`more`: before this one). Dead letters do not count: they hold no message back.
_IS_FIRST_OF_KEY = "NOT EXISTS (SELECT FROM outbox_deferred e WHERE e.order_key = {key} AND e.dead_at IS NULL{more})"
_IS_UNKNOWN = """NOT EXISTS (SELECT FROM outbox_inbox i WHERE i.consumer_group = %(group)s::text AND i.message_id = g.message_id)
    AND NOT EXISTS (SELECT FROM outbox_deferred d WHERE d.consumer_group = %(group)s::text AND d.message_id = g.message_id)"""

# Store messages that the group does not know yet, in their order, and record that the others are dropped. If a message's order
# key has a deferred message already, the message is stored asleep (`due_at` NULL). _IS_UNKNOWN also searches outbox_deferred,
# since ON CONFLICT alone would wait for a run that has deleted the message's row and not committed yet.
DEFER = f"""
WITH g AS MATERIALIZED (
    SELECT * FROM unnest(%(message_id)s::uuid[], %(own_id)s::text[], %(idempotency_key)s::text[], %(topic)s::text[],
        %(type)s::text[], %(tag)s::text[], %(key)s::text[], %(headers)s::text[], %(body)b::bytea[], %(stored_at)s::timestamptz[],
        %(source)s::text[], %(lane)s::smallint[], %(number)s::bigint[], %(delivery_count)s::int[], %(order_key)s::text[],
        %(failures)s::int[], %(crashes)s::int[], %(after)s::interval[], %(is_dead)s::bool[], %(reason)s::text[],
        %(error)s::text[], %(fingerprint)s::text[])
        WITH ORDINALITY g (message_id, own_id, idempotency_key, topic, type, tag, key, headers, body, stored_at, source, lane,
        number, delivery_count, order_key, failures, crashes, after, is_dead, reason, error, fingerprint, place)
), stored AS (
    INSERT INTO outbox_deferred (consumer_group, message_id, own_id, idempotency_key, topic, type, tag, key, headers, body,
        stored_at, source, lane, number, delivery_count, order_key, failures, crashes, due_at, dead_at, reason, error,
        fingerprint)
    SELECT %(group)s::text, message_id, own_id, idempotency_key, topic, type, tag, key, headers, body, stored_at, source, lane,
        number, delivery_count, order_key, failures, crashes,
        CASE WHEN order_key IS NULL OR {_IS_FIRST_OF_KEY.format(key="g.order_key", more="")} THEN clock_timestamp() + after END,
        CASE WHEN is_dead THEN clock_timestamp() END, reason, error, fingerprint
    FROM g WHERE {_IS_UNKNOWN}
    ORDER BY place
    ON CONFLICT (consumer_group, message_id) DO NOTHING RETURNING message_id
), dropped AS (
    INSERT INTO outbox_duplicate (consumer_group, message_id, topic, delivery_count)
    SELECT %(group)s::text, message_id, topic, delivery_count FROM g WHERE message_id NOT IN (SELECT message_id FROM stored)
)
SELECT message_id FROM stored
"""

# Record the beginning of a run, which counts as a crash until its end is recorded. Of the messages that this process has a
# handler for and that are the first of their order key, take the one that has been due for the longest time.
# `statement_timestamp()`, since a condition with the volatile `clock_timestamp()` could not use the index.
TAKE = f"""
WITH due AS MATERIALIZED (
    SELECT d.id FROM outbox_deferred d
    WHERE d.consumer_group = %(group)s AND d.dead_at IS NULL AND d.due_at <= statement_timestamp()
      AND (d.topic || '{SEPARATOR}' || d.type || '{SEPARATOR}*' = ANY (%(subscriptions)s::text[])
        OR d.topic || '{SEPARATOR}' || d.type || '{SEPARATOR}' || d.tag = ANY (%(subscriptions)s::text[])
        OR d.topic || '{SEPARATOR}topic ' || d.topic || '{SEPARATOR}*' = ANY (%(subscriptions)s::text[])
        OR d.topic || '{SEPARATOR}topic ' || d.topic || '{SEPARATOR}' || d.tag = ANY (%(subscriptions)s::text[]))
      AND (d.crashes = 0 OR %(may_doubt)s) AND {_IS_FIRST_OF_KEY.format(key="d.order_key", more=" AND e.id < d.id")}
    ORDER BY d.due_at LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE outbox_deferred d SET runs = runs + 1, crashes = crashes + 1, due_at = clock_timestamp() + interval '10 s'
FROM due WHERE d.id = due.id
RETURNING d.id, d.runs, d.crashes - 1, d.failures, d.message_id, d.idempotency_key, d.order_key, d.topic, d.own_id, d.body, d.key,
    d.tag, d.headers, d.delivery_count + d.runs, d.stored_at
"""

# The first statement of a run's second transaction, which holds all these locks until it ends. The row's lock is the lease. The
# advisory locks keep other processes from handling the message, a message with the same idempotency key of the handler (`own`),
# or another message of its order key. No row is returned if the run is over; false if another process has an advisory lock.
LEASE = f"""
WITH r AS MATERIALIZED (
    SELECT FROM outbox_deferred WHERE id = %(id)s AND runs = %(runs)s AND dead_at IS NULL FOR UPDATE SKIP LOCKED
)
SELECT pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || %(idempotency_key)s::text))
    AND (%(order)s::text IS NULL OR pg_try_advisory_xact_lock({Lock.ORDER}, hashtext(%(order)s::text)))
    AND (%(own)s::text IS NULL OR pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || %(own)s::text))),
    CASE WHEN %(idle)s::text IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'
        THEN set_config('idle_in_transaction_session_timeout', %(idle)s::text, true) END
FROM r
"""

# Move the message from outbox_deferred to the inbox. If the inbox has a row with its id or its key, only delete the deferred row.
CLAIM_DEFERRED = """
WITH d AS (
    DELETE FROM outbox_deferred WHERE id = %(id)s RETURNING 1
), i AS (
    INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, lane, number, delivery_count)
    SELECT %(group)s::text, %(key)s::text, %(message_id)s::uuid, %(source)s::text, %(topic)s::text, %(lane)s::smallint,
        %(number)s::bigint, %(delivery_count)s::int
    FROM d WHERE NOT EXISTS (
        SELECT FROM outbox_inbox WHERE consumer_group = %(group)s::text AND message_id = %(message_id)s::uuid)
    ON CONFLICT (consumer_group, idempotency_key) DO NOTHING RETURNING 1
)
SELECT EXISTS (SELECT FROM i)
"""

# Record the end of a run that did not end its message.
END = """
UPDATE outbox_deferred SET failures = %(failures)s, crashes = %(crashes)s, due_at = clock_timestamp() + %(after)s,
    dead_at = CASE WHEN %(is_dead)s THEN clock_timestamp() END,
    error = CASE WHEN %(error)s = '' THEN error ELSE %(error)s END,
    fingerprint = CASE WHEN %(error)s = '' THEN fingerprint ELSE %(fingerprint)s END
WHERE id = %(id)s AND runs = %(runs)s AND dead_at IS NULL
"""

# Count a run as no crash, since its handler was not called.
UNDO_BEGIN = """
UPDATE outbox_deferred SET crashes = greatest(crashes - 1, 0), due_at = clock_timestamp() + %(after)s
WHERE id = %(id)s AND runs = %(runs)s AND dead_at IS NULL
"""

# Record the end of runs that ended while the database was unavailable. The count of crashes is reset: these runs are no crashes.
END_LATE = """
UPDATE outbox_deferred d SET crashes = 0, due_at = clock_timestamp()
FROM unnest(%(ids)s::bigint[], %(runs)s::int[]) g (id, runs) WHERE d.id = g.id AND d.runs = g.runs AND d.dead_at IS NULL
"""

# Wake the first deferred message of a key.
WAKE_NEXT = """
UPDATE outbox_deferred SET due_at = clock_timestamp() WHERE due_at IS NULL AND dead_at IS NULL AND id = (
    SELECT id FROM outbox_deferred WHERE order_key = %(order)s AND dead_at IS NULL ORDER BY id LIMIT 1)
"""

# Wake the first message of each order key if it is asleep. WAKE_NEXT has missed it: the process that ended the earlier message
# died before that statement, or the message was deferred just after it. Locked rows are skipped until the next sweep.
SWEEP = """
WITH RECURSIVE head AS (
    (SELECT order_key, id, due_at FROM outbox_deferred WHERE dead_at IS NULL AND order_key IS NOT NULL
     ORDER BY order_key, id LIMIT 1)
    UNION ALL
    SELECT n.* FROM head h, LATERAL (
        SELECT order_key, id, due_at FROM outbox_deferred WHERE dead_at IS NULL AND order_key > h.order_key
        ORDER BY order_key, id LIMIT 1) n
)
UPDATE outbox_deferred SET due_at = clock_timestamp() WHERE id IN (
    SELECT d.id FROM head h JOIN outbox_deferred d ON d.id = h.id
    WHERE h.due_at IS NULL AND d.due_at IS NULL AND d.dead_at IS NULL FOR NO KEY UPDATE OF d SKIP LOCKED)
"""

# Whether a message of a group is due, whether one of any group is asleep, and the time until the next one of the group is due.
CHECK_DUE = """
SELECT EXISTS (
    SELECT FROM outbox_deferred WHERE consumer_group = %(group)s AND dead_at IS NULL AND due_at <= statement_timestamp()
), EXISTS (
    SELECT FROM outbox_deferred WHERE order_key IS NOT NULL AND dead_at IS NULL AND due_at IS NULL
), (
    SELECT extract(epoch FROM min(due_at) - statement_timestamp())::float8 FROM outbox_deferred
    WHERE consumer_group = %(group)s AND dead_at IS NULL AND due_at > statement_timestamp()
)
"""

# Insert a row into both tables, with a body of a certain size; the caller rolls back.
PROBE = """
WITH i AS (
    INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic)
    VALUES (%(group)s, %(id)s::text, %(id)s::uuid, '', '') RETURNING 1
)
INSERT INTO outbox_deferred (consumer_group, message_id, own_id, idempotency_key, topic, headers, body, delivery_count, reason)
SELECT %(group)s, %(id)s::uuid, '', '', '', '', %(body)b, 1, '' FROM i
"""


def defer(connection: Connection, group: str, deferrals: Sequence[tuple[Delivery, Deferral]]) -> list[bool]:
    """
    Store deliveries that the group does not know yet, in their order, in the caller's transaction; record the others as dropped.

    Returns:
        For each delivery, whether it was stored; False if the group knew it. Either way it may be acknowledged after the commit.

    Raises:
        psycopg.errors.LockNotAvailable: another process was storing one of the messages for longer than the lock timeout.
    """
    are_stored: list[bool] = []
    with psycopg.Cursor(connection) as cursor:  # the class of Django's cursors would interpolate the bodies into the statement
        for slice_ in _slices(deferrals):
            rows = [_row(delivery, deferral) for delivery, deferral in slice_]
            columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in rows[0]}
            stored = {message_id for (message_id,) in cursor.execute(DEFER, {**columns, "group": group})}
            are_stored += [row["message_id"] in stored for row in rows]
    return are_stored


def _slices(deferrals: Sequence[tuple[Delivery, Deferral]]) -> Iterator[list[tuple[Delivery, Deferral]]]:
    """Yield deferrals in their order, in lists that end where their bodies reach SLICE_BYTES."""
    slice_: list[tuple[Delivery, Deferral]] = []
    size = 0
    for delivery, deferral in deferrals:
        slice_.append((delivery, deferral))
        size += len(delivery.body)
        if size >= SLICE_BYTES:
            yield slice_
            slice_, size = [], 0
    if slice_:
        yield slice_


def _row(delivery: Delivery, deferral: Deferral) -> dict[str, Any]:
    info = DeliveryInfo.of(delivery)
    own_id = storable(delivery.message_id) or str(info.message_id)
    return {
        **asdict(info),
        **asdict(deferral),
        "own_id": own_id,
        "idempotency_key": idempotency_key_of(own_id, delivery.headers.get(Header.SOURCE, ""), info.topic),
        "type": storable(delivery.headers.get(Header.TYPE, "")),
        "tag": storable(delivery.tag),
        "key": storable(delivery.key),
        "headers": json.dumps(dict(delivery.headers)),  # JSON escapes NUL, which PostgreSQL cannot store
        "body": delivery.body,
        "stored_at": delivery.stored_at,
        "order_key": order_key_of(delivery),
    }


@contextmanager
def own_transaction(using: str) -> Iterator[Connection]:
    """
    Open a transaction for statements about deferred messages, and yield its connection.

    Its isolation level is READ COMMITTED, regardless of the level of handlers, so that no serialization failure ends it. It waits
    for a lock for at most a second.
    """
    with guarded_transaction(using):
        connection = database.raw(using)
        if len(connections[using].atomic_blocks) == 1:  # otherwise this is a savepoint in the transaction around a test
            for setting in SETTINGS:  # one by one, since a prepared statement cannot contain two commands
                connection.execute(setting)
        yield connection


def take(group: str, subscriptions: Sequence[str], using: str, *, may_doubt: bool) -> Taken | None:
    """
    Begin a run of the deferred message that has been due for the longest time.

    Args:
        subscriptions: the topics, types and tags that this process has handlers for, from `subscriptions_of`.
        may_doubt: also consider messages that may have killed a process (`crashes` above 0).

    Returns:
        The message; None if no message that this process may run is due.
    """
    values = {"group": group, "subscriptions": list(subscriptions), "may_doubt": may_doubt}
    with own_transaction(using) as connection:
        row = connection.execute(TAKE, values).fetchone()
    if row is None:
        return None
    topic, own_id, body, key, tag, headers, delivery_count, stored_at = row[7:]
    delivery = Delivery(
        group=group,
        topic=topic,
        message_id=own_id,
        body=bytes(body),
        receipt="",
        key=key,
        tag=tag,
        headers=json.loads(headers),
        delivery_count=delivery_count,
        stored_at=stored_at and database.aware(stored_at),
    )
    return Taken(delivery, *row[:7])


def lease(taken: Taken, handler_key: str | None, idle: str | None, using: str) -> bool | None:
    """
    Lock the row of a run in the caller's transaction, and limit the transaction's idle time to `idle`.

    `handler_key` is the idempotency key that the handler defines, or None.

    Returns:
        True if no other process is handling the message, or one with the same idempotency key or order key; otherwise False. None
        if this run is over: another process has taken the message, or the message has ended or is a dead letter.
    """
    values = {
        "id": taken.id,
        "runs": taken.runs,
        "group": taken.delivery.group,
        "idempotency_key": taken.idempotency_key,
        "own": handler_key,
    }
    row = database.raw(using).execute(LEASE, {**values, "order": taken.order_key, "idle": idle}).fetchone()
    return None if row is None else bool(row[0])


def claim_deferred(taken: Taken, info: DeliveryInfo, key: str, using: str) -> bool:
    """Move the message to the inbox in the caller's transaction; return False if the inbox has its id or its key already."""
    row = database.raw(using).execute(CLAIM_DEFERRED, {"id": taken.id, "key": key, **asdict(info)}).fetchone()
    return row is not None and bool(row[0])


def end(taken: Taken, deferral: Deferral, using: str) -> bool:
    """Write the end of a run that did not end its message; return False, and write nothing, if the run is over already."""
    values = {"id": taken.id, "runs": taken.runs, **asdict(deferral)}
    return database.raw(using).execute(END, values).rowcount > 0


def undo_begin(taken: Taken, after: timedelta, using: str) -> None:
    """Record that a run did not call the handler, so it is no crash; the message is due again when `after` is over."""
    database.raw(using).execute(UNDO_BEGIN, {"id": taken.id, "runs": taken.runs, "after": after})


def end_late(runs: Sequence[tuple[int, int]], using: str) -> None:
    """Record the end of runs, each the `id` and `runs` of a `Taken`, that could not be recorded when they ended."""
    with own_transaction(using) as connection:
        connection.execute(END_LATE, {"ids": [id_ for id_, _ in runs], "runs": [run for _, run in runs]})


def wake_next(order_key: str, using: str) -> None:
    """Make the first deferred message of an order key due, if it is asleep."""
    with own_transaction(using) as connection:
        connection.execute(WAKE_NEXT, {"order": order_key})


def sweep(using: str) -> None:
    """Make the first deferred message of each order key due, if it is asleep."""
    with own_transaction(using) as connection:
        connection.execute(SWEEP)


def check_due(group: str, using: str) -> tuple[bool, bool, float | None]:
    """
    Return whether a message of the group is due, whether one of any group is asleep, and the seconds until the next is due.

    The seconds are None if the group has no message that is due later.
    """
    row = database.raw(using).execute(CHECK_DUE, {"group": group}).fetchone()
    return row or (False, False, None)


def probe(group: str, body: bytes, using: str) -> None:
    """Raise an error if the database cannot store a message with this body."""
    with guarded_transaction(using):
        database.raw(using).execute(PROBE, {"group": group, "id": uuid.uuid4(), "body": body})
        transaction.set_rollback(True, using=using)

"""
The inbox: a row for each message that a group has handled, so that the group handles it once.

A delivery is *claimed* at the beginning of the handler's transaction: one statement takes an advisory lock on the idempotency
key, and inserts the inbox row. A second delivery of the message meanwhile does not wait for the lock, but is deferred. If a
process freezes, the server's timeout for idle transactions ends its transaction, which releases the lock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

import msgspec
from django.db import connections
from msgspec.structs import asdict

from outbox import conf, database
from outbox.brokers.base import Delivery
from outbox.consuming.delivery_info import DeliveryInfo, as_key, columns_of, idempotency_key_of, order_key_of
from outbox.consuming.failures import record_duplicate
from outbox.consuming.register import Consumer
from outbox.database.locks import Lock
from outbox.message import Header

IDLE_SHARE = 0.75  # idle timeout, as a fraction of INVISIBLE; the lease thread sends a statement every quarter of INVISIBLE

# Conditions in SQL. `_LOCK` still needs the name of a parameter, whose value is locked; `_IN_TABLE` the name of a table.
_LOCK = f"pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || %({{}})s::text))"
_IN_TABLE = "EXISTS (SELECT FROM {} WHERE consumer_group = %(group)s::text AND message_id = %(message_id)s::uuid)"
_IS_DEFERRED, _IS_ENDED = _IN_TABLE.format("outbox_deferred"), _IN_TABLE.format("outbox_inbox")


def _claim_statement(*, is_next: str = "true", is_known: str = "false") -> str:
    """
    Return the statement that claims a delivery. Both arguments are SQL conditions.

    The inbox row is not inserted if another process is handling a message with the same idempotency key, if the inbox has a row
    with that key, if `is_next` is false (an earlier message of the order key is deferred or being handled), or if `is_known` is
    true (a table has a row with this message's id). The statement also limits the transaction's idle time to the parameter
    `idle`, unless that is NULL or a limit is set already.
    """
    return f"""
WITH l AS MATERIALIZED (
    SELECT {_LOCK.format("key")} AS is_locked, {is_next} AS is_next, {is_known} AS is_known,
        CASE WHEN %(idle)s::text IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'
            THEN set_config('idle_in_transaction_session_timeout', %(idle)s::text, true) END
), i AS (
    INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, lane, number, delivery_count)
    SELECT %(group)s::text, %(key)s::text, %(message_id)s::uuid, %(source)s::text, %(topic)s::text, %(lane)s::smallint,
        %(number)s::bigint, %(delivery_count)s::int
    FROM l WHERE is_locked AND is_next AND NOT is_known
    ON CONFLICT (consumer_group, idempotency_key) DO NOTHING
    RETURNING 1
)
SELECT is_known, is_locked, is_next, EXISTS (SELECT FROM i) FROM l
"""


_IS_NEXT = f"""(pg_try_advisory_xact_lock({Lock.ORDER}, hashtext(%(order)s::text))
            AND NOT EXISTS (SELECT FROM outbox_deferred WHERE order_key = %(order)s::text AND dead_at IS NULL))"""

# CLAIM does not search outbox_deferred: redelivered messages are not claimed. If the publisher has sent a second copy, and the
# copy is handled, then housekeeping deletes the deferred row.
CLAIM = _claim_statement()
CLAIM_IN_ORDER = _claim_statement(is_next=_IS_NEXT, is_known=_IS_DEFERRED)

# Claims with a key that the handler defines. The inbox row of a discarded message has the message's id as its key, so a row with
# the handler's key does not conflict with that row. LOCK_MESSAGE locks the id first; then both tables are searched for it.
LOCK_MESSAGE = f"SELECT {_LOCK.format('message_key')}"
CLAIM_BY_HANDLER_KEY = _claim_statement(is_known=f"({_IS_DEFERRED} OR {_IS_ENDED})")
CLAIM_BY_HANDLER_KEY_IN_ORDER = _claim_statement(is_next=_IS_NEXT, is_known=f"({_IS_DEFERRED} OR {_IS_ENDED})")

# Claim several deliveries from unordered topics, as CLAIM does for one.
CLAIM_MANY = f"""
WITH l AS MATERIALIZED (
    SELECT g.*, pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || key)) AS is_locked
    FROM unnest(%(keys)s::text[], %(message_ids)s::uuid[], %(sources)s::text[], %(topics)s::text[], %(lanes)s::smallint[],
        %(numbers)s::bigint[], %(delivery_counts)s::int[])
        WITH ORDINALITY g (key, message_id, source, topic, lane, number, delivery_count, place)
), t AS MATERIALIZED (
    SELECT CASE WHEN %(idle)s::text IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'
        THEN set_config('idle_in_transaction_session_timeout', %(idle)s::text, true) END
), i AS (
    INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, lane, number, delivery_count)
    SELECT %(group)s::text, key, message_id, source, topic, lane, number, delivery_count FROM l WHERE is_locked
    ON CONFLICT (consumer_group, idempotency_key) DO NOTHING
    RETURNING idempotency_key
)
SELECT is_locked, i.idempotency_key IS NOT NULL FROM t, l LEFT JOIN i ON i.idempotency_key = l.key ORDER BY place
"""

# Insert a row for a message that is dropped because another message with its idempotency key was handled, so that its number
# counts as arrived. A deferred message must have no row: the group has yet to handle it, although a copy of it is dropped.
RECORD_DROPPED = """
INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, lane, number)
SELECT %(group)s, %(message_id)s::text, %(message_id)s, %(source)s, %(topic)s, %(lane)s::smallint, %(number)s::bigint
WHERE NOT EXISTS (
    SELECT FROM outbox_inbox
    WHERE consumer_group = %(group)s AND idempotency_key = %(key)s AND message_id = %(message_id)s
) AND NOT EXISTS (SELECT FROM outbox_deferred WHERE consumer_group = %(group)s AND message_id = %(message_id)s)
ON CONFLICT (consumer_group, idempotency_key) DO NOTHING
"""


class Claim(enum.Enum):
    """The result of claiming a delivery."""

    CLAIMED = enum.auto()  # the handler has to be called
    KNOWN = enum.auto()  # the group has ended or deferred the message, or has handled another one with its idempotency key
    BUSY = enum.auto()  # another process is handling the message, or another one with its idempotency key
    BEHIND = enum.auto()  # an earlier message of its order key is deferred, or is being handled


class InboxEntry(msgspec.Struct, frozen=True):
    """
    A delivery of a message that a group is about to handle.

    Args:
        key: the idempotency key, by which duplicates are found: the value of the handler's `idempotency_key`, or `message_key`.
        message_key: identifies the message itself: the result of `idempotency_key_of`, which is the id of an outbox's message.
        order_key: the result of `order_key_of`, which identifies group, topic and key; None on topics without order.
    """

    arrival: DeliveryInfo
    key: str
    message_key: str
    order_key: str | None = None

    @classmethod
    def of(cls, delivery: Delivery, consumer: Consumer, message: object) -> Self:
        """Return the entry of a delivery."""
        handler_key = consumer.idempotency_key(message) if consumer.idempotency_key else None
        message_key = idempotency_key_of(delivery.message_id, delivery.headers.get(Header.SOURCE, ""), delivery.topic)
        # The subject keeps the keys of a group's handlers apart from each other, and from message ids.
        key = message_key if handler_key is None else as_key(f"{consumer.subject}:{handler_key}")
        return cls(DeliveryInfo.of(delivery), key, message_key, order_key_of(delivery))


def claim(entry: InboxEntry, using: str) -> Claim:
    """
    Insert the inbox row in the caller's transaction, and limit the idle time of that transaction to less than `INVISIBLE`.

    So if this process freezes, its transaction ends before the message is delivered again. There is no limit if the transaction
    is nested in another one, such as the one around a test.
    """
    values = {**asdict(entry.arrival), "key": entry.key, "order": entry.order_key, "idle": idle_limit(using)}
    if entry.key == entry.message_key:
        statement = CLAIM if entry.order_key is None else CLAIM_IN_ORDER
    else:
        statement = CLAIM_BY_HANDLER_KEY if entry.order_key is None else CLAIM_BY_HANDLER_KEY_IN_ORDER
        with database.bound_cursor(using) as cursor:
            cursor.execute(LOCK_MESSAGE, {"group": entry.arrival.group, "message_key": entry.message_key})
            if not cursor.fetchone()[0]:
                return Claim.BUSY
    cached = database.kept_cursor(using, statement)
    cached.execute(statement, values)
    is_known, is_locked, is_next, is_new = cached.cursor.fetchone()  # psycopg's cursor, without the overhead of Django's wrapper
    if is_known:
        return Claim.KNOWN
    if not is_locked:
        return Claim.BUSY
    if not is_next:
        return Claim.BEHIND
    return Claim.CLAIMED if is_new else Claim.KNOWN


def claim_many(entries: Sequence[InboxEntry], using: str) -> list[Claim]:
    """Claim deliveries in one statement, for a handler without `idempotency_key`. Of equal entries, at most one is CLAIMED."""
    columns = columns_of([entry.arrival for entry in entries])
    keys = [entry.key for entry in entries]
    with database.bound_cursor(using) as cursor:
        cursor.execute(CLAIM_MANY, {"group": entries[0].arrival.group, "keys": keys, "idle": idle_limit(using), **columns})
        rows = cursor.fetchall()
    claims, seen = [], set()
    for entry, (is_locked, is_new) in zip(entries, rows, strict=True):
        is_copy = entry.key in seen  # CLAIM_MANY joins the new rows by their keys, so copies seem new, too
        seen.add(entry.key)
        claims.append(Claim.BUSY if not is_locked else Claim.CLAIMED if is_new and not is_copy else Claim.KNOWN)
    return claims


def idle_limit(using: str) -> str | None:
    """Return the timeout for idle transactions as a string of milliseconds; None in a nested transaction, as in a test."""
    if len(connections[using].atomic_blocks) > 1:
        return None
    return str(int(max(1, conf.settings().consumer.invisible * IDLE_SHARE // timedelta(milliseconds=1))))


def drop(entry: InboxEntry, using: str) -> None:
    """Record that a delivery is dropped: the group knows the message, or has handled another one with its idempotency key."""
    record_duplicate(entry.arrival, using)
    if entry.key != entry.message_key:
        with connections[using].cursor() as cursor:
            cursor.execute(RECORD_DROPPED, {**asdict(entry.arrival), "key": entry.key})

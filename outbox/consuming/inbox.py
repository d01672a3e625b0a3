"""
The inbox: a group handles a message once.

The row is inserted first, in the handler's own transaction, together with an advisory lock that is held until the transaction
ends. A second delivery of the message in the meantime finds the lock taken; it does not wait, and is deferred. A timeout for idle
transactions ends the one of a frozen process.
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

IDLE_SHARE = 0.75  # of INVISIBLE; the lease thread sends a statement in each quarter

_LOCK = f"pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || %({{}})s::text))"
_IN_TABLE = "EXISTS (SELECT FROM {} WHERE consumer_group = %(group)s::text AND message_id = %(message_id)s::uuid)"
_IS_DEFERRED, _IS_ENDED = _IN_TABLE.format("outbox_deferred"), _IN_TABLE.format("outbox_inbox")


def _claim_statement(*, is_next: str = "true", is_known: str = "false") -> str:
    """
    Return the statement that inserts an inbox row.

    Nothing is written where the group has handled the key, or another process handles it now; where the message is not the next
    one of its key (`is_next`), or is known already (`is_known`). It sets the timeout of the idle transaction to `idle`, unless
    the database has a setting for it.
    """
    return f"""
WITH l AS MATERIALIZED (
    SELECT {_LOCK.format("key")} AS is_mine, {is_next} AS is_next, {is_known} AS is_known,
        CASE WHEN %(idle)s::text IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'
            THEN set_config('idle_in_transaction_session_timeout', %(idle)s::text, true) END
), i AS (
    INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, lane, number, delivery_count)
    SELECT %(group)s::text, %(key)s::text, %(message_id)s::uuid, %(source)s::text, %(topic)s::text, %(lane)s::smallint,
        %(number)s::bigint, %(delivery_count)s::int
    FROM l WHERE is_mine AND is_next AND NOT is_known
    ON CONFLICT (consumer_group, idempotency_key) DO NOTHING
    RETURNING 1
)
SELECT is_known, is_mine, is_next, EXISTS (SELECT FROM i) FROM l
"""


_IS_NEXT = f"""(pg_try_advisory_xact_lock({Lock.ORDER}, hashtext(%(order)s::text))
            AND NOT EXISTS (SELECT FROM outbox_deferred WHERE order_key = %(order)s::text AND dead_at IS NULL))"""

# A topic without order is not asked whether the message is deferred: one that was delivered before does not come here.
CLAIM = _claim_statement()
CLAIM_IN_ORDER = _claim_statement(is_next=_IS_NEXT, is_known=_IS_DEFERRED)

# Under a handler's own idempotency key, a copy of a discarded message has another key than the message's inbox row, so the
# message is looked for by its id, under a lock of its own that was taken before.
LOCK_MESSAGE = f"SELECT {_LOCK.format('message_key')}"
CLAIM_OWN = _claim_statement(is_known=f"({_IS_DEFERRED} OR {_IS_ENDED})")
CLAIM_OWN_IN_ORDER = _claim_statement(is_next=_IS_NEXT, is_known=f"({_IS_DEFERRED} OR {_IS_ENDED})")

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
    INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, lane, number, delivery_count)
    SELECT %(group)s::text, key, message_id, source, topic, lane, number, delivery_count FROM l WHERE is_mine
    ON CONFLICT (consumer_group, idempotency_key) DO NOTHING
    RETURNING idempotency_key, message_id
)
SELECT is_mine, i.message_id IS NOT NULL
FROM t, l LEFT JOIN i ON i.idempotency_key = l.key AND i.message_id = l.message_id ORDER BY place
"""

# Another message was handled under the same idempotency key: record that the number of this one has arrived too.
ARRIVED_TOO = """
INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, lane, number)
SELECT %(group)s, %(message_id)s::text, %(message_id)s, %(source)s, %(topic)s, %(lane)s::smallint, %(number)s::bigint
WHERE NOT EXISTS (
    SELECT FROM outbox_inbox
    WHERE consumer_group = %(group)s AND idempotency_key = %(key)s AND message_id = %(message_id)s
)
ON CONFLICT (consumer_group, idempotency_key) DO NOTHING
"""


class Claim(enum.Enum):
    """The result of a claim."""

    MINE = enum.auto()
    KNOWN = enum.auto()  # the group has ended or deferred it
    BUSY = enum.auto()  # another process handles it now
    BEHIND = enum.auto()  # an earlier message of its key is deferred, or being handled


class InboxEntry(msgspec.Struct, frozen=True):
    """
    A message that a group is about to handle.

    Args:
        key: identifies duplicates: the handler's own idempotency key, or that of the message.
        message_key: that of the message.
        order_key: of a key on an ordered topic; None on others.
    """

    arrival: DeliveryInfo
    key: str
    message_key: str
    order_key: str | None = None

    @classmethod
    def of(cls, delivery: Delivery, consumer: Consumer, message: object) -> Self:
        """Return the entry of a delivery."""
        own = consumer.idempotency_key(message) if consumer.idempotency_key else None
        message_key = idempotency_key_of(delivery.message_id, delivery.headers.get(Header.SOURCE, ""), delivery.topic)
        # The subject keeps the keys of a group's handlers apart from each other, and from message ids.
        key = message_key if own is None else as_key(f"{consumer.subject}:{own}")
        return cls(DeliveryInfo.of(delivery), key, message_key, order_key_of(delivery))


def claim(entry: InboxEntry, using: str) -> Claim:
    """
    Insert the inbox row in the caller's transaction, and limit its idle time to less than `INVISIBLE`.

    So the transaction has ended when the message is delivered again. The transaction around a test is not limited.
    """
    values = {**asdict(entry.arrival), "key": entry.key, "order": entry.order_key, "idle": idle_limit(using)}
    if entry.key == entry.message_key:
        statement = CLAIM if entry.order_key is None else CLAIM_IN_ORDER
    else:
        statement = CLAIM_OWN if entry.order_key is None else CLAIM_OWN_IN_ORDER
        with database.bound_cursor(using) as cursor:
            cursor.execute(LOCK_MESSAGE, {"group": entry.arrival.group, "message_key": entry.message_key})
            if not cursor.fetchone()[0]:
                return Claim.BUSY
    kept = database.kept_cursor(using, statement)
    kept.execute(statement, values)
    is_known, is_mine, is_next, is_new = kept.cursor.fetchone()  # the result is here already: there is no error to translate
    if is_known:
        return Claim.KNOWN
    if not is_mine:
        return Claim.BUSY
    if not is_next:
        return Claim.BEHIND
    return Claim.MINE if is_new else Claim.KNOWN


def claim_many(entries: Sequence[InboxEntry], using: str) -> list[Claim]:
    """Insert inbox rows as `claim` does, in one statement. Of several entries with one key, only one can be MINE."""
    columns = columns_of([entry.arrival for entry in entries])
    keys = [entry.key for entry in entries]
    with database.bound_cursor(using) as cursor:
        cursor.execute(CLAIM_MANY, {"group": entries[0].arrival.group, "keys": keys, "idle": idle_limit(using), **columns})
        rows = cursor.fetchall()
    claims, seen = [], set()
    for entry, (is_mine, is_new) in zip(entries, rows, strict=True):
        name = (entry.key, entry.arrival.message_id)  # the row names the message that it was written for
        is_copy = name in seen
        seen.add(name)
        claims.append(Claim.BUSY if not is_mine else Claim.MINE if is_new and not is_copy else Claim.KNOWN)
    return claims


def idle_limit(using: str) -> str | None:
    """Return how many milliseconds the transaction may be idle; None inside the transaction of a test."""
    if len(connections[using].atomic_blocks) > 1:
        return None
    return str(int(max(1, conf.settings().consumer.invisible * IDLE_SHARE // timedelta(milliseconds=1))))


def drop(entry: InboxEntry, using: str) -> None:
    """Record that a delivery was dropped, because the group knows its message, or has handled another one with its key."""
    record_duplicate(entry.arrival, using)
    if entry.key != entry.message_key:
        with connections[using].cursor() as cursor:
            cursor.execute(ARRIVED_TOO, {**asdict(entry.arrival), "key": entry.key})

"""
End deliveries: acknowledge or release them, hold them longer, or begin them again.

A receipt is the delivery's id and its count (rows.py), which no delivery has twice. Each statement matches both. When a delivery
is taken again, its count changes (receiver.py), so a late call changes nothing after another consumer has taken the message.
Until then the call succeeds, however late it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from outbox.brokers.base import Delivery
from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.embedded.clock import NOW
from outbox.embedded.log import NOTIFY

ACK = """
WITH given AS (SELECT * FROM unnest(%(ids)s::bigint[], %(delivery_counts)s::int[]) AS g (id, delivery_count))
DELETE FROM outbox_embedded_delivery d USING given g
WHERE d.id = g.id AND d.delivery_count = g.delivery_count
RETURNING d.id
"""

# Skips rows that an ACK in another thread has locked, so that the two cannot deadlock.
RENEW = f"""
WITH held AS (
    SELECT d.id FROM outbox_embedded_delivery d
    JOIN unnest(%(ids)s::bigint[], %(delivery_counts)s::int[]) AS g (id, delivery_count) USING (id, delivery_count)
    FOR UPDATE OF d SKIP LOCKED
)
UPDATE outbox_embedded_delivery d SET due_at = {NOW} + %(invisible_for)s FROM held WHERE d.id = held.id
RETURNING d.id
"""

WAKE = f"SELECT {NOTIFY}"

# Until the deliveries are committed, no prune deletes their messages (retention.py). A statement of its own, so that the
# snapshot of the next one is newer than the lock.
HOLD_OFF_PRUNES = f"""
SELECT pg_advisory_xact_lock_shared({Lock.BROKER_TOPIC}, topic_id) FROM (
    SELECT DISTINCT topic_id FROM outbox_embedded_offset WHERE consumer_group = %(group)s ORDER BY topic_id
) t
"""

# Messages that a group has read and finished become due again.
DELIVER_AGAIN = f"""
WITH given AS (
    INSERT INTO outbox_embedded_delivery (consumer_group, topic_id, queue, pos, order_key, delivery_count, due_at)
    SELECT o.consumer_group, m.topic_id, m.queue, m.pos,
        CASE WHEN t.type = 'fifo' THEN hashtextextended(m.key, 0) END, 0, {NOW}
    FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id
    JOIN outbox_embedded_offset o ON o.topic_id = m.topic_id AND o.queue = m.queue AND o.pos >= m.pos
    WHERE o.consumer_group = %(group)s AND m.message_id = ANY(%(message_ids)s) AND NOT EXISTS (
        SELECT FROM outbox_embedded_delivery d
        WHERE d.consumer_group = o.consumer_group AND d.topic_id = m.topic_id AND d.queue = m.queue AND d.pos = m.pos)
    RETURNING topic_id, queue, pos
)
SELECT m.message_id, {NOTIFY}
FROM given JOIN outbox_embedded_message m USING (topic_id, queue, pos)
"""


def ack(connection: Connection, deliveries: Sequence[Delivery]) -> list[bool]:
    """Acknowledge deliveries; return, for each, whether it was still held."""
    return _change_held(connection, ACK, deliveries, {})


def renew(
    connection: Connection, deliveries: Sequence[Delivery], invisible_for: timedelta, *, now: datetime | None
) -> list[Delivery | None]:
    """Hold deliveries for that long from now; return those that were still held. Their receipts do not change."""
    held = _change_held(connection, RENEW, deliveries, {"invisible_for": invisible_for, "now": now})
    return [delivery if is_held else None for delivery, is_held in zip(deliveries, held, strict=True)]


def release(connection: Connection, deliveries: Sequence[Delivery], *, now: datetime | None) -> None:
    """Make the messages of deliveries that are still held due at once, and notify waiting consumers."""
    renew(connection, deliveries, timedelta(), now=now)
    connection.execute(WAKE)


def deliver_again(connection: Connection, group: str, message_ids: Sequence[str], *, now: datetime | None) -> set[str]:
    """Deliver messages again that a group has finished, with deliveries counted from 1; return their ids."""
    with connection.transaction():
        connection.execute(HOLD_OFF_PRUNES, {"group": group})
        rows = connection.execute(DELIVER_AGAIN, {"group": group, "message_ids": list(message_ids), "now": now}).fetchall()
    return {row[0] for row in rows}


def _change_held(
    connection: Connection, statement: str, deliveries: Sequence[Delivery], parameters: dict[str, object]
) -> list[bool]:
    receipts = [delivery.receipt.split(":") for delivery in deliveries]
    ids, delivery_counts = [int(receipt[0]) for receipt in receipts], [int(receipt[1]) for receipt in receipts]
    changed = {row[0] for row in connection.execute(statement, {"ids": ids, "delivery_counts": delivery_counts, **parameters})}
    return [delivery_id in changed for delivery_id in ids]

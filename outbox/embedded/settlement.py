"""
Settle deliveries: acknowledge, retry, release or dead-letter them, or hold them longer.

A receipt is the delivery's id and its count (rows.py), which no delivery has twice. Each statement matches both, and that the
delivery is still held. When a delivery is taken again, its count changes (receiver.py), so a late call changes nothing after
another consumer has taken the message. Until then the call succeeds, however late it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from outbox.brokers.base import BrokerDeadLetter, Delivery
from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.embedded.clock import NOW
from outbox.embedded.log import NOTIFY
from outbox.message import Header, read_headers

ACK = """
WITH given AS (SELECT * FROM unnest(%(ids)s::bigint[], %(delivery_counts)s::int[]) AS g (id, delivery_count))
DELETE FROM outbox_embedded_delivery d USING given g
WHERE d.id = g.id AND d.delivery_count = g.delivery_count AND d.is_held
RETURNING d.id
"""

# Skips rows that an ACK in another thread has locked, so that the two cannot deadlock.
RENEW = f"""
WITH held AS (
    SELECT d.id FROM outbox_embedded_delivery d
    JOIN unnest(%(ids)s::bigint[], %(delivery_counts)s::int[]) AS g (id, delivery_count) USING (id, delivery_count)
    WHERE d.is_held FOR UPDATE OF d SKIP LOCKED
)
UPDATE outbox_embedded_delivery d SET due_at = {NOW} + %(invisible_for)s FROM held WHERE d.id = held.id
RETURNING d.id
"""

# Skips locked rows, as RENEW does. The messages are due at once, so waiting consumers are notified.
RELEASE = f"""
WITH held AS (
    SELECT d.id FROM outbox_embedded_delivery d
    JOIN unnest(%(ids)s::bigint[], %(delivery_counts)s::int[]) AS g (id, delivery_count) USING (id, delivery_count)
    WHERE d.is_held FOR UPDATE OF d SKIP LOCKED
),
released AS (
    UPDATE outbox_embedded_delivery d SET is_held = false, due_at = {NOW} FROM held WHERE d.id = held.id RETURNING d.id
)
SELECT id, {NOTIFY} FROM released
"""

RETRY = f"""
UPDATE outbox_embedded_delivery SET is_held = false, due_at = {NOW} + %(after)s
WHERE id = %(id)s AND delivery_count = %(delivery_count)s AND is_held
RETURNING id
"""

DEAD_LETTER = f"""
UPDATE outbox_embedded_delivery SET is_held = false, died_at = {NOW}, reason = %(reason)s
WHERE id = %(id)s AND delivery_count = %(delivery_count)s AND is_held
RETURNING id
"""

DEAD_LETTERS = """
SELECT d.id::text, d.consumer_group, t.name, m.message_id, d.reason, d.delivery_count, d.died_at, m.headers
FROM outbox_embedded_delivery d
JOIN outbox_embedded_message m USING (topic_id, queue, pos)
JOIN outbox_embedded_topic t ON t.id = d.topic_id
WHERE d.consumer_group = %(group)s AND d.died_at IS NOT NULL
ORDER BY d.died_at, d.id LIMIT %(limit)s
"""

COUNT_DEAD_LETTERS = """
SELECT t.name, count(*) FROM outbox_embedded_delivery d JOIN outbox_embedded_topic t ON t.id = d.topic_id
WHERE d.consumer_group = %(group)s AND d.died_at IS NOT NULL GROUP BY 1
"""

# A replayed message gets a new id, since its deliveries are counted from 1 again: a receipt from before must not match.
REPLAY = f"""
WITH letter AS (
    SELECT id FROM outbox_embedded_delivery
    WHERE consumer_group = %(group)s AND id = ANY(%(ids)s) AND died_at IS NOT NULL FOR UPDATE
),
given AS (
    UPDATE outbox_embedded_delivery d SET id = DEFAULT, died_at = NULL, reason = '', delivery_count = 0, due_at = {NOW}
    FROM letter WHERE d.id = letter.id RETURNING letter.id
)
SELECT id::text, {NOTIFY} FROM given
"""

DISCARD = """
DELETE FROM outbox_embedded_delivery WHERE consumer_group = %(group)s AND id = ANY(%(ids)s) AND died_at IS NOT NULL
RETURNING id::text
"""

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
    INSERT INTO outbox_embedded_delivery (consumer_group, topic_id, queue, pos, order_key, delivery_count, is_held, due_at)
    SELECT o.consumer_group, m.topic_id, m.queue, m.pos,
        CASE WHEN t.type = 'fifo' THEN hashtextextended(m.key, 0) END, 0, false, {NOW}
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


def ack(connection: Connection, deliveries: Sequence[Delivery], *, now: datetime | None) -> list[bool]:
    """Acknowledge deliveries; return, for each, whether it was still held."""
    return _change_held(connection, ACK, deliveries, {"now": now})


def renew(
    connection: Connection, deliveries: Sequence[Delivery], invisible_for: timedelta, *, now: datetime | None
) -> list[Delivery | None]:
    """Hold deliveries for that long from now; return those that were still held. Their receipts do not change."""
    held = _change_held(connection, RENEW, deliveries, {"invisible_for": invisible_for, "now": now})
    return [delivery if is_held else None for delivery, is_held in zip(deliveries, held, strict=True)]


def release(connection: Connection, deliveries: Sequence[Delivery], *, now: datetime | None) -> None:
    """Release deliveries that are still held; their messages are due at once."""
    _change_held(connection, RELEASE, deliveries, {"now": now})


def retry(connection: Connection, delivery: Delivery, after: timedelta, *, now: datetime | None) -> bool:
    """Make the message due again after that time."""
    return _end_one(connection, RETRY, delivery, {"after": after, "now": now})


def dead_letter(connection: Connection, delivery: Delivery, reason: str, *, now: datetime | None) -> bool:
    """Make the message a dead letter; retention keeps it as long as it is one."""
    return _end_one(connection, DEAD_LETTER, delivery, {"reason": reason.replace("\0", ""), "now": now})


def dead_letters(connection: Connection, group: str, limit: int) -> list[BrokerDeadLetter]:
    """Return the dead letters of a group, oldest first."""
    rows = connection.execute(DEAD_LETTERS, {"group": group, "limit": limit})
    return [replace(BrokerDeadLetter(*row[:-1]), source=read_headers(row[-1]).get(Header.SOURCE, "")) for row in rows]


def count_dead_letters(connection: Connection, group: str) -> dict[str, int]:
    """Return the number of dead letters of a group, by topic."""
    return dict(connection.execute(COUNT_DEAD_LETTERS, {"group": group}).fetchall())


def replay(connection: Connection, group: str, letters: Collection[str], *, now: datetime | None) -> set[str]:
    """Deliver dead letters again; return the ids of those that existed."""
    rows = connection.execute(REPLAY, {"group": group, "ids": [int(one) for one in letters], "now": now}).fetchall()
    return {row[0] for row in rows}


def discard(connection: Connection, group: str, letters: Collection[str]) -> set[str]:
    """Delete dead letters; return the ids of those that existed."""
    rows = connection.execute(DISCARD, {"group": group, "ids": [int(one) for one in letters]}).fetchall()
    return {row[0] for row in rows}


def deliver_again(connection: Connection, group: str, message_ids: Sequence[str], *, now: datetime | None) -> set[str]:
    """Deliver messages again that a group has finished, with deliveries counted from 1; return their ids."""
    with connection.transaction():
        connection.execute(HOLD_OFF_PRUNES, {"group": group})
        rows = connection.execute(DELIVER_AGAIN, {"group": group, "message_ids": list(message_ids), "now": now}).fetchall()
    return {row[0] for row in rows}


def _change_held(
    connection: Connection, statement: str, deliveries: Sequence[Delivery], parameters: dict[str, object]
) -> list[bool]:
    receipts = [_read(delivery.receipt) for delivery in deliveries]
    ids, delivery_counts = [one[0] for one in receipts], [one[1] for one in receipts]
    changed = {row[0] for row in connection.execute(statement, {"ids": ids, "delivery_counts": delivery_counts, **parameters})}
    return [delivery_id in changed for delivery_id in ids]


def _end_one(connection: Connection, statement: str, delivery: Delivery, parameters: dict[str, object]) -> bool:
    delivery_id, delivery_count = _read(delivery.receipt)
    found = connection.execute(statement, {"id": delivery_id, "delivery_count": delivery_count, **parameters})
    return found.fetchone() is not None


def _read(text: str) -> tuple[int, int]:
    delivery_id, delivery_count = text.split(":")
    return int(delivery_id), int(delivery_count)

"""Look-ups for operators and tests: how many messages wait, where a message is."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from outbox.brokers.base import StoredCopy
from outbox.database import Connection
from outbox.embedded.clock import NOW

# Messages ahead of the offsets, of whatever tag, and those that were read and not finished; no dead letters.
BACKLOG = """
SELECT t.name, sum(
    (SELECT count(*) FROM outbox_embedded_message m
     WHERE m.topic_id = o.topic_id AND m.queue = o.queue AND m.pos > o.pos)
    + (SELECT count(*) FROM outbox_embedded_delivery d
       WHERE d.consumer_group = o.consumer_group AND d.topic_id = o.topic_id AND d.queue = o.queue AND d.died_at IS NULL)
)::bigint
FROM outbox_embedded_offset o JOIN outbox_embedded_topic t ON t.id = o.topic_id
WHERE o.consumer_group = %(group)s GROUP BY t.name
"""

# Messages that a group has before it, of those with these ids: not read yet, or read and not finished; dead letters, too, for
# they can be replayed. Deliveries are read along their two indexes.
OPEN = """
WITH asked AS MATERIALIZED (
    SELECT topic_id, queue, pos, message_id FROM outbox_embedded_message WHERE message_id = ANY(%(message_ids)s::text[])
)
SELECT a.message_id FROM asked a JOIN outbox_embedded_offset o USING (topic_id, queue)
WHERE o.consumer_group = %(group)s AND o.pos < a.pos
UNION
SELECT a.message_id FROM asked a JOIN (
    SELECT topic_id, queue, pos FROM outbox_embedded_delivery WHERE consumer_group = %(group)s AND died_at IS NULL
    UNION ALL
    SELECT topic_id, queue, pos FROM outbox_embedded_delivery WHERE consumer_group = %(group)s AND died_at IS NOT NULL
) d USING (topic_id, queue, pos)
"""

FIND = f"""
SELECT t.name, f.state, f.half_id, f.stored_at FROM (
    SELECT topic_id, CASE state WHEN 3 THEN 'rolled_back' ELSE 'half' END AS state, id::text AS half_id, born_at AS stored_at
    FROM outbox_embedded_half WHERE message_id = %(message_id)s AND state <> 2
    UNION ALL
    SELECT topic_id, CASE WHEN deliver_at > {NOW} THEN 'delayed' ELSE 'visible' END, '', NULL
    FROM outbox_embedded_delayed WHERE message_id = %(message_id)s
    UNION ALL
    SELECT m.topic_id, CASE WHEN EXISTS (
        SELECT FROM outbox_embedded_delivery d
        WHERE d.topic_id = m.topic_id AND d.queue = m.queue AND d.pos = m.pos AND d.died_at IS NOT NULL
    ) THEN 'dead_letter' ELSE 'visible' END, coalesce(half_id::text, ''), stored_at
    FROM outbox_embedded_message m WHERE message_id = %(message_id)s
) f JOIN outbox_embedded_topic t ON t.id = f.topic_id
"""


def backlog(connection: Connection, group: str) -> dict[str, int]:
    """Count, per topic, what waits for a group."""
    return dict(connection.execute(BACKLOG, {"group": group}).fetchall())


def open_ids(connection: Connection, group: str, message_ids: Collection[str]) -> set[str]:
    """Return the ids of the messages that a group has before it, of these."""
    rows = connection.execute(OPEN, {"group": group, "message_ids": list(message_ids)})
    return {message_id for (message_id,) in rows}


def find(connection: Connection, message_id: str, *, now: datetime | None) -> list[StoredCopy]:
    """Look a message up among halves, delayed and visible messages."""
    rows = connection.execute(FIND, {"message_id": message_id, "now": now})
    return [StoredCopy(message_id, topic, state, half_id, stored_at) for topic, state, half_id, stored_at in rows]

"""Look-ups: a group's backlog, messages that may be delivered again, and the stored copies of a message."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from outbox.brokers.base import StoredCopy
from outbox.database import Connection
from outbox.embedded.clock import NOW

# Messages after the offsets, of any tag, and messages that were read but not finished; no dead letters.
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

# Messages with these ids that may be delivered to a group: not read yet, read but not finished, or dead letters, which can be
# replayed. Deliveries are read by their two partial indexes.
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
    """Return the number of messages that wait for a group, by topic."""
    return dict(connection.execute(BACKLOG, {"group": group}).fetchall())


def open_ids(connection: Connection, group: str, message_ids: Collection[str]) -> set[str]:
    """Return the ids, of these, of messages that may be delivered to a group."""
    rows = connection.execute(OPEN, {"group": group, "message_ids": list(message_ids)})
    return {message_id for (message_id,) in rows}


def find(connection: Connection, message_id: str, *, now: datetime | None) -> list[StoredCopy]:
    """Return the copies of a message among half messages, delayed messages and visible ones."""
    rows = connection.execute(FIND, {"message_id": message_id, "now": now})
    return [StoredCopy(message_id, topic, state, half_id, stored_at) for topic, state, half_id, stored_at in rows]

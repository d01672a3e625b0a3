"""Look-ups: a group's backlog, messages that may be delivered again, and the stored copies of a message."""

from __future__ import annotations

from collections.abc import Collection

from outbox.brokers.base import StoredCopy
from outbox.database import Connection

# Counts, by topic, the messages after the group's offsets, of any tag, and the messages that were read but not finished.
BACKLOG = """
SELECT t.name, sum(
    (SELECT count(*) FROM outbox_embedded_message m
     WHERE m.topic_id = o.topic_id AND m.queue = o.queue AND m.pos > o.pos)
    + (SELECT count(*) FROM outbox_embedded_delivery d
       WHERE d.consumer_group = o.consumer_group AND d.topic_id = o.topic_id AND d.queue = o.queue)
)::bigint
FROM outbox_embedded_offset o JOIN outbox_embedded_topic t ON t.id = o.topic_id
WHERE o.consumer_group = %(group)s GROUP BY t.name
"""

# Returns those of the given ids whose messages a group has not read or not finished.
UNFINISHED = """
WITH asked AS MATERIALIZED (
    SELECT topic_id, queue, pos, message_id FROM outbox_embedded_message WHERE message_id = ANY(%(message_ids)s::text[])
)
SELECT a.message_id FROM asked a JOIN outbox_embedded_offset o USING (topic_id, queue)
WHERE o.consumer_group = %(group)s AND o.pos < a.pos
UNION
SELECT a.message_id FROM asked a JOIN outbox_embedded_delivery d USING (topic_id, queue, pos) WHERE d.consumer_group = %(group)s
"""

FIND = """
SELECT %(message_id)s, t.name, f.state, f.half_id, f.stored_at, f.asked, f.ended_at FROM (
    SELECT topic_id, CASE state WHEN 3 THEN 'rolled_back' ELSE 'half' END AS state, id::text AS half_id, born_at AS stored_at,
        asked, ended_at
    FROM outbox_embedded_half WHERE message_id = %(message_id)s AND state <> 2
    UNION ALL
    SELECT topic_id, 'visible', coalesce(half_id::text, ''), stored_at, 0, NULL
    FROM outbox_embedded_message WHERE message_id = %(message_id)s
) f JOIN outbox_embedded_topic t ON t.id = f.topic_id
"""


def backlog(connection: Connection, group: str) -> dict[str, int]:
    """Return the number of messages that wait for a group, by topic."""
    return dict(connection.execute(BACKLOG, {"group": group}).fetchall())


def unfinished_ids(connection: Connection, group: str, message_ids: Collection[str]) -> set[str]:
    """Return those of the ids whose messages a group has not read or not finished."""
    rows = connection.execute(UNFINISHED, {"group": group, "message_ids": list(message_ids)})
    return {message_id for (message_id,) in rows}


def find(connection: Connection, message_id: str) -> list[StoredCopy]:
    """Return the copies of a message among half messages and visible ones."""
    return [StoredCopy(*row) for row in connection.execute(FIND, {"message_id": message_id})]

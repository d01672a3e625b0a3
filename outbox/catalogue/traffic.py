"""How many of a database's newest messages were published, handled and failed, by type and group, with one statement."""

from __future__ import annotations

from datetime import datetime

import msgspec
from psycopg.rows import class_row

from outbox.consuming.register import groups
from outbox.database import Connection

NEWEST = 10_000  # the number of newest messages that are counted

# The newest messages, and whether each group that reads their topic has handled them. A message that failed and was handled later
# counts as both. A group's inbox rows are only in the group's database.
TRAFFIC = """
WITH message AS MATERIALIZED (
    SELECT m.id, t.name AS topic, coalesce(m.headers::jsonb ->> 'ce-type', '') AS type, m.created_at
    FROM outbox_message m JOIN outbox_topic t ON t.id = m.topic_id
    WHERE m.topic_id <> 0 ORDER BY m.id DESC LIMIT %(limit)s
), oldest AS MATERIALIZED (SELECT id FROM message ORDER BY id LIMIT 1
), handled AS (
    SELECT consumer_group, message_id, max(handled_at) AS at FROM outbox_inbox
    WHERE message_id >= (SELECT id FROM oldest) GROUP BY 1, 2
), failed AS (
    SELECT DISTINCT consumer_group, message_id FROM outbox_failed_delivery WHERE message_id >= (SELECT id FROM oldest)
), delivered AS (
    SELECT message.topic, message.type, reader.name AS consumer_group, handled.at, failed.message_id IS NOT NULL AS has_failed
    FROM message JOIN unnest(%(groups)s::text[], %(topics)s::text[]) reader (name, topic) ON reader.topic = message.topic
    LEFT JOIN handled ON handled.consumer_group = reader.name AND handled.message_id = message.id
    LEFT JOIN failed ON failed.consumer_group = reader.name AND failed.message_id = message.id
    WHERE handled.at IS NOT NULL OR failed.message_id IS NOT NULL
)
SELECT topic, type, '' AS consumer_group, count(*) AS messages, 0 AS failed, max(created_at) AS last_at FROM message GROUP BY 1, 2
UNION ALL
SELECT topic, type, consumer_group, count(*), count(*) FILTER (WHERE has_failed), max(at) FROM delivered GROUP BY 1, 2, 3
ORDER BY 1, 2, 3
"""


class Traffic(msgspec.Struct, frozen=True):
    """
    The number of the newest messages of a type that were published, or that a group has tried to handle.

    Args:
        type: the type's name on the wire; "" for messages without a type.
        consumer_group: "" for published messages.
        failed: the number of messages that have failed at least once in the group.
        last_at: when the last of the messages was published or handled.
    """

    topic: str
    type: str
    consumer_group: str
    messages: int
    failed: int
    last_at: datetime | None


def read_traffic(connection: Connection) -> list[Traffic]:
    """Return the traffic of the newest messages of a database."""
    readers = [(group.name, topic) for group in groups().values() for topic in group.topics]
    arguments = {"limit": NEWEST, "groups": [name for name, _ in readers], "topics": [topic for _, topic in readers]}
    return connection.cursor(row_factory=class_row(Traffic)).execute(TRAFFIC, arguments).fetchall()

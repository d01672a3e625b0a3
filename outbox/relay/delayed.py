"""Delayed messages: each gets its ticket when it is due."""

from __future__ import annotations

from outbox.database import Connection

# In the order of `due_at`, so that the tickets' positions follow it. clock_timestamp() is in a subquery, because an index scan
# needs a value, not a volatile function.
MOVE_DUE = """
WITH due AS (
    SELECT message_id FROM outbox_delayed WHERE due_at <= (SELECT clock_timestamp())
    ORDER BY due_at LIMIT %s FOR UPDATE SKIP LOCKED
), moved AS (
    DELETE FROM outbox_delayed WHERE message_id = ANY(ARRAY(SELECT message_id FROM due))
    RETURNING message_id, topic_id, order_key, due_at
)
INSERT INTO outbox_ticket (message_id, topic_id, order_key)
SELECT message_id, topic_id, order_key FROM moved ORDER BY due_at, message_id
"""


MOVE_LIMIT = 1000  # rows in one statement


def move_due(connection: Connection, *, limit: int = MOVE_LIMIT) -> int:
    """Turn at most `limit` delayed rows that are due into tickets; return how many."""
    return connection.execute(MOVE_DUE, [limit]).rowcount

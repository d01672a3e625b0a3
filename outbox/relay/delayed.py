"""Messages published with a delay: they get their ticket when they are due."""

from __future__ import annotations

from outbox.database import Connection

# In the order of their times, which the tickets' positions then have. The time stands in a subquery: an index is searched
# by a value, not by a volatile function.
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


MOVED_AT_ONCE = 1000


def move_due(connection: Connection, *, limit: int = MOVED_AT_ONCE) -> int:
    """Turn at most `limit` delayed rows that are due into tickets; return how many."""
    return connection.execute(MOVE_DUE, [limit]).rowcount

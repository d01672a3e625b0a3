"""What the outbox shows of the embedded broker's tables: on the overview, in the status, on a message's page."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg.rows import class_row

from outbox.brokers.base import BrokerStatus, DeadLetterCount, StoredCopy
from outbox.database import Connection

PARKED = """
SELECT t.name, count(*) FROM outbox_embedded_half h JOIN outbox_embedded_topic t ON t.id = h.topic_id
WHERE h.state = 1 GROUP BY 1 ORDER BY 1
"""

# What consumer groups gave up, along the index of dead deliveries.
DEAD_LETTERS = """
SELECT d.consumer_group, t.name AS topic, count(*) AS letters FROM outbox_embedded_delivery d
JOIN outbox_embedded_topic t ON t.id = d.topic_id WHERE d.died_at IS NOT NULL GROUP BY 1, 2 ORDER BY 1, 2
"""

# The visible message, and the half messages that did not become it.
COPIES = """
SELECT m.message_id, t.name, 'visible', m.half_id::text, m.stored_at, 0, NULL::timestamptz
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id WHERE m.message_id = %(id)s
UNION ALL
SELECT h.message_id, t.name, CASE h.state WHEN 2 THEN 'committed' WHEN 3 THEN 'rolled_back' ELSE 'half' END, h.id::text,
    h.born_at, h.asked, h.ended_at
FROM outbox_embedded_half h JOIN outbox_embedded_topic t ON t.id = h.topic_id
WHERE h.id = ANY(%(halves)s::bigint[]) AND h.message_id = %(id)s
"""


def read_status(connection: Connection) -> BrokerStatus:
    """Return the parked half messages and the dead letters in a database."""
    parked: dict[str, int] = dict(connection.execute(PARKED).fetchall())
    return BrokerStatus(parked, connection.cursor(row_factory=class_row(DeadLetterCount)).execute(DEAD_LETTERS).fetchall())


def read_copies(connection: Connection, message_id: str, half_ids: Sequence[str]) -> list[StoredCopy]:
    """Return what the tables hold of a message."""
    numbers = [half for half in half_ids if half.isascii() and half.isdecimal() and len(half) < 19]
    rows = connection.execute(COPIES, {"id": message_id, "halves": numbers}).fetchall()
    return [StoredCopy(*row) for row in rows]

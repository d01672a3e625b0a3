"""Queries of the embedded broker's tables for the status, the overview and the page of a message."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg.rows import class_row

from outbox.brokers.base import BrokerStatus, DeadLetterCount, StoredCopy
from outbox.database import Connection
from outbox.embedded.half_state import HalfState

PARKED = f"""
SELECT t.name, count(*) FROM outbox_embedded_half h JOIN outbox_embedded_topic t ON t.id = h.topic_id
WHERE h.state = {HalfState.PARKED} GROUP BY 1 ORDER BY 1
"""

# Dead letters of consumer groups, by the partial index of dead deliveries.
DEAD_LETTERS = """
SELECT d.consumer_group, t.name AS topic, count(*) AS letters FROM outbox_embedded_delivery d
JOIN outbox_embedded_topic t ON t.id = d.topic_id WHERE d.died_at IS NOT NULL GROUP BY 1, 2 ORDER BY 1, 2
"""

GROUPS = "SELECT DISTINCT consumer_group FROM outbox_embedded_offset ORDER BY 1"

# The visible message, and half messages of it that still have a row.
COPIES = f"""
SELECT m.message_id, t.name, 'visible', m.half_id::text, m.stored_at, 0, NULL::timestamptz
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id WHERE m.message_id = %(id)s
UNION ALL
SELECT h.message_id, t.name,
    CASE h.state WHEN {HalfState.COMMITTED} THEN 'committed' WHEN {HalfState.ROLLED_BACK} THEN 'rolled_back' ELSE 'half' END,
    h.id::text, h.born_at, h.asked, h.ended_at
FROM outbox_embedded_half h JOIN outbox_embedded_topic t ON t.id = h.topic_id
WHERE h.id = ANY(%(halves)s::bigint[]) AND h.message_id = %(id)s
"""


def read_status(connection: Connection) -> BrokerStatus:
    """Return the parked half messages, the dead letters and the consumer groups in a database."""
    parked: dict[str, int] = dict(connection.execute(PARKED).fetchall())
    letters = connection.cursor(row_factory=class_row(DeadLetterCount)).execute(DEAD_LETTERS).fetchall()
    return BrokerStatus(parked, letters, [group for (group,) in connection.execute(GROUPS).fetchall()])


def read_copies(connection: Connection, message_id: str, half_ids: Sequence[str]) -> list[StoredCopy]:
    """Return the copies of a message in the tables."""
    numbers = [half for half in half_ids if half.isascii() and half.isdecimal() and len(half) < 19]
    rows = connection.execute(COPIES, {"id": message_id, "halves": numbers}).fetchall()
    return [StoredCopy(*row) for row in rows]

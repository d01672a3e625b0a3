"""
The claim of a message that was sent alone: the few new tickets of one topic become a batch that brings along what they say.

Ordered topics are claimed as always (`claim.py`): their keys may be held.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import psycopg
from psycopg.rows import tuple_row

from outbox.batches.batch import Batch
from outbox.batches.claim import Scope
from outbox.database import Connection
from outbox.message import TopicType
from outbox.models import State

FEW = 16  # messages, and none of them larger than:
SMALL = 4096  # bytes

# The oldest tickets of one topic without order become a batch of few messages, which come along. As small a plan as it can be:
# where each message comes alone, to start a plan costs more than what it does.
CLAIM_TOPIC = f"""
WITH w AS (
    SELECT name, type, ordered FROM outbox_topic
    WHERE id = %(topic)s AND NOT paused AND broker = %(broker)s AND name <> ALL(%(without)s::text[])),
t AS (
    DELETE FROM outbox_ticket WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM outbox_ticket
        WHERE topic_id = %(topic)s AND pos >= %(scan_from)s AND EXISTS (SELECT FROM w WHERE NOT ordered)
        ORDER BY pos LIMIT {FEW} FOR UPDATE SKIP LOCKED))
    RETURNING pos, message_id),
a AS (SELECT array_agg(message_id ORDER BY pos) AS ids, count(*) AS n, max(pos) AS last_pos FROM t HAVING count(*) > 0),
k AS (
    INSERT INTO outbox_lane AS l (topic_id, lane, last_seq) SELECT %(topic)s, %(lane)s, n FROM a
    ON CONFLICT (topic_id, lane) DO UPDATE SET last_seq = l.last_seq + excluded.last_seq
    RETURNING l.last_seq),
b AS (
    INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, state, owner, lease_until)
    SELECT %(topic)s, %(lane)s, k.last_seq - a.n + 1, a.ids, {State.CLAIMED}, %(lane)s, clock_timestamp() + %(lease)s FROM a, k
    RETURNING id, attempt, first_seq, message_ids)
SELECT w.name, w.type, w.ordered, a.last_pos, b.id, b.attempt, b.first_seq, b.message_ids::text[],
    m.key, m.headers, m.about, CASE WHEN octet_length(m.body) <= {SMALL} THEN m.body END
FROM w LEFT JOIN (a CROSS JOIN b CROSS JOIN unnest(b.message_ids) WITH ORDINALITY u(id, n)) ON true
LEFT JOIN outbox_message m ON m.id = u.id
ORDER BY u.n
"""


@dataclass(frozen=True, slots=True)
class NewOfTopic:
    """
    What a claim of one topic found.

    Args:
        topic: its name. None: it is paused, left out, or another broker's.
        last_pos: position of the last ticket that the claim took.
        batch: None where no ticket could be taken, and on ordered topics.
    """

    topic: str | None = None
    is_ordered: bool = False
    last_pos: int | None = None
    batch: Batch | None = None

    @property
    def is_empty(self) -> bool:
        """Whether a topic that could be claimed by this had nothing."""
        return self.topic is not None and not self.is_ordered and self.batch is None


def claim_topic(
    connection: Connection, scope: Scope, topic_id: int, *, lane: int, lease: timedelta, scan_from: int = 0
) -> NewOfTopic:
    """
    Turn the oldest tickets of one topic without order, few of them, into a batch that brings along what its messages say.

    Args:
        scan_from: the ticket position to begin at.
    """
    arguments = {"topic": topic_id, "broker": scope.broker, "without": list(scope.without), "lane": lane, "lease": lease}
    # A class of its own: Django's cursors, which a test may hand in, cannot read bodies in binary.
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        rows = cursor.execute(CLAIM_TOPIC, {**arguments, "scan_from": scan_from}, binary=True).fetchall()
    if not rows:
        return NewOfTopic()
    topic, kind, is_ordered, last_pos, batch_id, attempt, first_seq, message_ids = rows[0][:8]
    if batch_id is None:
        return NewOfTopic(topic, is_ordered)
    messages = [row[8:] for row in rows]
    are_whole = all(message[0] is None or message[3] is not None for message in messages)
    batch = Batch(
        batch_id, attempt, topic, TopicType(kind), lane, first_seq, message_ids, messages=messages if are_whole else None
    )
    return NewOfTopic(topic, is_ordered, last_pos, batch)

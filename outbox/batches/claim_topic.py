"""
Claim the few new tickets of one topic, and load their messages with the same statement.

Ordered topics are claimed by `claim.py`, because their keys may be held.
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

FEW = 16  # messages in one claim
SMALL = 4096  # bytes of body; a batch with a larger one is loaded later

# The oldest tickets of one unordered topic become a batch of few messages, which are returned with it. The plan is as small as
# possible: where messages come one by one, starting a plan costs more than running it.
CLAIM_TOPIC = f"""
WITH topic AS (
    SELECT name, type, ordered FROM outbox_topic
    WHERE id = %(topic)s AND NOT paused AND broker = %(broker)s AND name <> ALL(%(without)s::text[])),
taken AS (
    DELETE FROM outbox_ticket WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM outbox_ticket
        WHERE topic_id = %(topic)s AND pos >= %(scan_from)s AND EXISTS (SELECT FROM topic WHERE NOT ordered)
        ORDER BY pos LIMIT {FEW} FOR UPDATE SKIP LOCKED))
    RETURNING pos, message_id),
grouped AS (
    SELECT array_agg(message_id ORDER BY pos) AS ids, count(*) AS size, max(pos) AS last_pos FROM taken HAVING count(*) > 0),
numbered AS (
    INSERT INTO outbox_lane AS lane (topic_id, lane, last_seq) SELECT %(topic)s, %(lane)s, size FROM grouped
    ON CONFLICT (topic_id, lane) DO UPDATE SET last_seq = lane.last_seq + excluded.last_seq
    RETURNING lane.last_seq),
batch AS (
    INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, state, owner, lease_until)
    SELECT %(topic)s, %(lane)s, numbered.last_seq - grouped.size + 1, grouped.ids, {State.CLAIMED}, %(lane)s,
        clock_timestamp() + %(lease)s
    FROM grouped, numbered
    RETURNING id, attempt, first_seq, message_ids)
SELECT topic.name, topic.type, topic.ordered, grouped.last_pos, batch.id, batch.attempt, batch.first_seq,
    batch.message_ids::text[], message.key, message.headers, message.about,
    CASE WHEN octet_length(message.body) <= {SMALL} THEN message.body END
FROM topic LEFT JOIN (
    grouped CROSS JOIN batch CROSS JOIN unnest(batch.message_ids) WITH ORDINALITY member(id, position)) ON true
LEFT JOIN outbox_message message ON message.id = member.id
ORDER BY member.position
"""


@dataclass(frozen=True, slots=True)
class TopicClaim:
    """
    The result of a claim of one topic.

    Args:
        topic: its name. None: it is paused, left out, or another broker's.
        last_pos: position of the last ticket that was claimed.
        batch: None where no ticket could be claimed, and on ordered topics.
    """

    topic: str | None = None
    is_ordered: bool = False
    last_pos: int | None = None
    batch: Batch | None = None

    @property
    def is_empty(self) -> bool:
        """Whether this is an unordered topic of which no ticket could be claimed."""
        return self.topic is not None and not self.is_ordered and self.batch is None


def claim_topic(
    connection: Connection, scope: Scope, topic_id: int, *, lane: int, lease: timedelta, scan_from: int = 0
) -> TopicClaim:
    """
    Turn a few of the oldest tickets of one unordered topic into a batch, loaded with its messages.

    Args:
        scan_from: the ticket position at which to begin.
    """
    arguments = {"topic": topic_id, "broker": scope.broker, "without": list(scope.without), "lane": lane, "lease": lease}
    # Not connection.cursor(): in tests that is Django's, which cannot read bodies in binary format.
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        rows = cursor.execute(CLAIM_TOPIC, {**arguments, "scan_from": scan_from}, binary=True).fetchall()
    if not rows:
        return TopicClaim()
    topic, kind, is_ordered, last_pos, batch_id, attempt, first_seq, message_ids = rows[0][:8]
    if batch_id is None:
        return TopicClaim(topic, is_ordered)
    messages = [row[8:] for row in rows]
    are_all_small = all(message[0] is None or message[3] is not None for message in messages)
    batch = Batch(
        batch_id, attempt, topic, TopicType(kind), lane, first_seq, message_ids, messages=messages if are_all_small else None
    )
    return TopicClaim(topic, is_ordered, last_pos, batch)

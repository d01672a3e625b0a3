"""
Deletes messages that are past their topic's retention and that every group has finished.

Messages within a topic's retention are kept, and so are messages stored since `keep_since`. After that, a message is kept while
any group that reads the topic has not read or not finished it. So a group that is no longer used prevents deletions in its topics
until it is forgotten. A half message is never deleted before it is committed or rolled back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.embedded.clock import NOW
from outbox.embedded.half_state import HalfState
from outbox.embedded.topics import StoredTopic

SLICE = 1000

# A group that begins to read a topic during a prune could miss messages. So the statement that stores the group's first offsets
# (JOIN in receiver.py) takes this lock shared, and a prune takes it exclusively before its statement, each until it is committed.
# The prune then sees each group that has begun, and other groups begin after it. A prune does not wait for the lock; the next
# prune deletes the messages that this one leaves.
TRY_LOCK = f"SELECT pg_try_advisory_xact_lock({Lock.BROKER_TOPIC}, %(topic_id)s)"

# Rows that were stored or ended up to this time are past their retention, and older than `keep_since`. LEAST ignores a NULL.
OLD_UNTIL = f"least({NOW} - %(retention)s, %(keep_since)s::timestamptz - interval '1 microsecond')"

# Prunes one slice of a queue, which begins after position `after` and ends before the first message that a group has not read.
# Returns the last position of the slice, whether all its messages are old, and how many were deleted. The statement that moves a
# group's offset also writes the delivery rows (receiver.py), so a message that was read and not finished always has such a row.
PRUNE = f"""
WITH slice AS (
    SELECT m.pos, m.stored_at <= {OLD_UNTIL} AS is_old, EXISTS (
        SELECT FROM outbox_embedded_delivery d
        WHERE d.topic_id = m.topic_id AND d.queue = m.queue AND d.pos = m.pos
    ) AS is_kept
    FROM outbox_embedded_message m
    WHERE m.topic_id = %(topic_id)s AND m.queue = %(queue)s AND m.pos > %(after)s AND m.pos <= coalesce((
        SELECT min(o.pos) FROM outbox_embedded_offset o WHERE o.topic_id = %(topic_id)s AND o.queue = %(queue)s
    ), m.pos)
    ORDER BY m.pos LIMIT %(slice)s
),
deleted AS (
    DELETE FROM outbox_embedded_message m USING slice
    WHERE m.topic_id = %(topic_id)s AND m.queue = %(queue)s AND m.pos = slice.pos AND is_old AND NOT is_kept RETURNING m.pos
)
SELECT max(pos), bool_and(is_old), (SELECT count(*) FROM deleted) FROM slice
"""

PRUNE_ENDED_HALVES = f"""
DELETE FROM outbox_embedded_half WHERE id IN (
    SELECT id FROM outbox_embedded_half
    WHERE topic_id = %(topic_id)s AND state IN ({HalfState.COMMITTED}, {HalfState.ROLLED_BACK}) AND ended_at <= {OLD_UNTIL}
    LIMIT %(slice)s
)
"""

FORGET_GROUP = """
WITH chosen AS MATERIALIZED (SELECT id FROM outbox_embedded_topic WHERE name = ANY(%(topics)s)),
deliveries AS (
    DELETE FROM outbox_embedded_delivery WHERE consumer_group = %(group)s AND topic_id IN (SELECT id FROM chosen)
)
DELETE FROM outbox_embedded_offset WHERE consumer_group = %(group)s AND topic_id IN (SELECT id FROM chosen)
"""


def prune(
    connection: Connection,
    topics: Iterable[tuple[StoredTopic, timedelta]],
    *,
    keep_since: datetime | None,
    limit: int,
    now: datetime | None,
) -> int:
    """Delete messages and ended half messages, about `limit` at most, one slice per statement. Return how many were deleted."""
    deleted = 0
    for topic, retention in topics:
        values = {"topic_id": topic.id, "retention": retention, "keep_since": keep_since, "slice": SLICE, "now": now}
        deleted += connection.execute(PRUNE_ENDED_HALVES, values).rowcount
        for queue in range(topic.queues):
            deleted += _prune_queue(connection, {**values, "queue": queue}, limit - deleted)
    return deleted


def _prune_queue(connection: Connection, values: dict[str, object], limit: int) -> int:
    deleted, after, is_old = 0, 0, True
    while is_old and deleted < limit:
        with connection.transaction():
            if connection.execute(TRY_LOCK, values).fetchone() != (True,):
                break
            row = connection.execute(PRUNE, {**values, "after": after}).fetchone()
        after, is_old, count = row or (0, False, 0)
        deleted += count
    return deleted


def forget_group(connection: Connection, group: str, topics: Collection[str]) -> None:
    """Delete a group's offsets and deliveries in these topics, so that they no longer keep messages."""
    connection.execute(FORGET_GROUP, {"group": group, "topics": list(topics)})

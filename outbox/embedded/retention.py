"""
Retention: drop what every group has finished and whose time is over.

Within a topic's retention nothing is dropped, nor what was stored since `keep_since`. After that, a message stays while a
group that has begun in the topic has not read it, holds it, waits to retry it, or keeps it as a dead letter. So a group that
is gone for good holds its topics until `forget_group()`. A half that nobody ended is never dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.embedded.clock import NOW
from outbox.embedded.topics import StoredTopic

SLICE = 1000

# A group that begins in a topic while its messages are dropped would read some of them. So it holds this lock shared until its
# offsets (or deliveries) are committed, and a prune takes it before its statement looks: it sees each group that has begun,
# and the others find only what it has left. A prune waits for nobody; what it leaves out the next one drops.
TRY_LOCK = f"SELECT pg_try_advisory_xact_lock({Lock.BROKER_TOPIC}, %(topic_id)s)"

# What was stored or ended up to this time is past its retention, and no end since then is unconfirmed. LEAST ignores a NULL.
OLD = f"least({NOW} - %(retention)s, %(keep_since)s::timestamptz - interval '1 microsecond')"

# One slice behind position `after`: how far it looked, whether all it saw is old, and how many it dropped. A message that
# a group has read has its delivery row since the statement that moved the offset (receiver.py): no moment lies between.
PRUNE = f"""
WITH slice AS (
    SELECT m.pos, m.stored_at <= {OLD} AS is_old, EXISTS (
        SELECT FROM outbox_embedded_delivery d
        WHERE d.topic_id = m.topic_id AND d.queue = m.queue AND d.pos = m.pos
    ) AS is_kept
    FROM outbox_embedded_message m
    WHERE m.topic_id = %(topic_id)s AND m.queue = %(queue)s AND m.pos > %(after)s AND m.pos <= coalesce((
        SELECT min(o.pos) FROM outbox_embedded_offset o WHERE o.topic_id = %(topic_id)s AND o.queue = %(queue)s
    ), m.pos)
    ORDER BY m.pos LIMIT %(slice)s
),
gone AS (
    DELETE FROM outbox_embedded_message m USING slice s
    WHERE m.topic_id = %(topic_id)s AND m.queue = %(queue)s AND m.pos = s.pos AND s.is_old AND NOT s.is_kept RETURNING m.pos
)
SELECT max(pos), bool_and(is_old), (SELECT count(*) FROM gone) FROM slice
"""

PRUNE_ENDED_HALVES = f"""
DELETE FROM outbox_embedded_half WHERE id IN (
    SELECT id FROM outbox_embedded_half WHERE topic_id = %(topic_id)s AND state IN (2, 3) AND ended_at <= {OLD}
    LIMIT %(slice)s
)
"""

FORGET_GROUP = """
WITH d AS (DELETE FROM outbox_embedded_delivery WHERE consumer_group = %(group)s)
DELETE FROM outbox_embedded_offset WHERE consumer_group = %(group)s
"""


def prune(
    connection: Connection,
    topics: Iterable[tuple[StoredTopic, timedelta]],
    *,
    keep_since: datetime | None,
    limit: int,
    now: datetime | None,
) -> int:
    """Drop up to about `limit` messages and remembered ends, a slice per statement; return how many."""
    dropped = 0
    for topic, retention in topics:
        about = {"topic_id": topic.id, "retention": retention, "keep_since": keep_since, "slice": SLICE, "now": now}
        dropped += connection.execute(PRUNE_ENDED_HALVES, about).rowcount
        for queue in range(topic.queues):
            dropped += _prune_queue(connection, {**about, "queue": queue}, limit - dropped)
    return dropped


def _prune_queue(connection: Connection, about: dict[str, object], limit: int) -> int:
    dropped, after, is_old = 0, 0, True
    while is_old and dropped < limit:
        with connection.transaction():
            if connection.execute(TRY_LOCK, about).fetchone() != (True,):
                break
            row = connection.execute(PRUNE, {**about, "after": after}).fetchone()
        after, is_old, count = row or (0, False, 0)
        dropped += count
    return dropped


def forget_group(connection: Connection, group: str) -> None:
    """Delete a group's offsets, deliveries and dead letters. A group that comes back starts as a new one."""
    connection.execute(FORGET_GROUP, {"group": group})

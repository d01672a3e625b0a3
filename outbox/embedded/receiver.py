"""
Reading by consumer groups: an offset per queue, and a delivery row for each message that was read and not finished.

A receiver locks a group's offset only for the statement that moves it (SKIP LOCKED: the next receiver takes another
queue meanwhile), and the delivery rows are written by that statement: a message is either still ahead of the offset or
has a delivery row, whenever a process dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.database import Connection
from outbox.embedded import log
from outbox.embedded.clock import NOW
from outbox.embedded.rows import ReadRow
from outbox.embedded.topics import StoredTopic
from outbox.message import TopicType

SCAN = 500  # a group that wants some tags only looks at so many messages at once
AHEAD = 1000  # of a fifo queue a group reads so far past messages that wait for their key's head

# A group begins in a topic at its first message, or behind its last.
JOIN = """
INSERT INTO outbox_embedded_offset (consumer_group, topic_id, queue, pos)
SELECT %(group)s, t.id, n, CASE WHEN %(at_end)s THEN coalesce(q.last_pos, 0) ELSE 0 END
FROM outbox_embedded_topic t CROSS JOIN LATERAL generate_series(0, t.queues - 1) AS n
LEFT JOIN outbox_embedded_queue q ON q.topic_id = t.id AND q.queue = n
WHERE t.id = ANY(%(topic_ids)s)
ON CONFLICT DO NOTHING
"""

# At random, so that receivers spread over the queues and no queue waits behind a busy one.
UNREAD = """
SELECT o.topic_id, o.queue FROM outbox_embedded_offset o JOIN outbox_embedded_queue q USING (topic_id, queue)
WHERE o.consumer_group = %(group)s AND o.topic_id = ANY(%(topic_ids)s) AND o.pos < q.last_pos
ORDER BY random()
"""

# Moves the offset to the last message it takes, or over all it saw when the group wants no more of those. What the snapshot
# shows is a beginning of the queue without a gap to be filled later (log.py). One row with NULLs: the offset moved, and
# there is nothing to hand out yet.
READ_ON = f"""
WITH place AS MATERIALIZED (
    SELECT pos FROM outbox_embedded_offset
    WHERE consumer_group = %(group)s AND topic_id = %(topic_id)s AND queue = %(queue)s
    FOR UPDATE SKIP LOCKED
),
room AS (
    SELECT CASE WHEN %(is_fifo)s THEN greatest(0, least(%(limit)s, %(ahead)s - (
        SELECT count(*) FROM outbox_embedded_delivery
        WHERE consumer_group = %(group)s AND topic_id = %(topic_id)s AND queue = %(queue)s
          AND order_key IS NOT NULL AND died_at IS NULL
    ))) ELSE %(limit)s END AS messages
),
seen AS MATERIALIZED (
    SELECT m.*, %(tags)s::text[] IS NULL OR m.tag = ANY(%(tags)s::text[]) AS is_wanted
    FROM place CROSS JOIN LATERAL (
        SELECT * FROM outbox_embedded_message
        WHERE topic_id = %(topic_id)s AND queue = %(queue)s AND pos > place.pos ORDER BY pos LIMIT %(scan)s
    ) m
),
wanted AS MATERIALIZED (SELECT * FROM seen WHERE is_wanted ORDER BY pos LIMIT (SELECT messages FROM room)),
next AS (
    SELECT CASE
        WHEN (SELECT count(*) FROM wanted) = (SELECT messages FROM room) THEN (SELECT max(pos) FROM wanted)
        ELSE (SELECT max(pos) FROM seen)
    END AS pos
),
moved AS (
    UPDATE outbox_embedded_offset o SET pos = next.pos FROM place, next
    WHERE o.consumer_group = %(group)s AND o.topic_id = %(topic_id)s AND o.queue = %(queue)s AND place.pos < next.pos
    RETURNING o.queue
),
held AS (
    INSERT INTO outbox_embedded_delivery
        (consumer_group, topic_id, queue, pos, order_key, attempt, is_held, due_at)
    SELECT %(group)s, %(topic_id)s, %(queue)s, pos,
           CASE WHEN %(is_fifo)s THEN hashtextextended(key, 0) END,
           CASE WHEN %(is_fifo)s THEN 0 ELSE 1 END, NOT %(is_fifo)s,
           CASE WHEN %(is_fifo)s THEN {NOW} ELSE {NOW} + %(invisible_for)s END
    FROM wanted ORDER BY pos
    RETURNING id, pos, attempt, is_held
)
SELECT h.id, h.attempt, w.topic_id, w.message_id, w.key, w.tag, w.headers, w.body, w.stored_at
FROM moved LEFT JOIN (held h JOIN wanted w ON h.is_held AND w.pos = h.pos) ON true
ORDER BY h.pos
"""

# What is due again, and on fifo topics the heads: a message none of whose key stands before it. An earlier one cannot turn
# up later: they are read in their order, under the lock of the offset.
TAKE_DUE = f"""
WITH due AS (
    SELECT d.id FROM outbox_embedded_delivery d
    WHERE d.consumer_group = %(group)s AND d.topic_id = ANY(%(topic_ids)s)
      AND d.died_at IS NULL AND d.due_at <= {NOW}
      AND (d.order_key IS NULL OR NOT EXISTS (
          SELECT FROM outbox_embedded_delivery e
          WHERE e.consumer_group = d.consumer_group AND e.topic_id = d.topic_id AND e.order_key = d.order_key
            AND e.pos < d.pos AND e.died_at IS NULL
      ))
    ORDER BY d.due_at, d.id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
),
taken AS (
    UPDATE outbox_embedded_delivery d SET attempt = attempt + 1, is_held = true, due_at = {NOW} + %(invisible_for)s
    FROM due WHERE d.id = due.id RETURNING d.id, d.topic_id, d.queue, d.pos, d.attempt
)
SELECT t.id, t.attempt, m.topic_id, m.message_id, m.key, m.tag, m.headers, m.body, m.stored_at
FROM taken t CROSS JOIN LATERAL (
    SELECT * FROM outbox_embedded_message m
    WHERE m.topic_id = t.topic_id AND m.queue = t.queue AND m.pos = t.pos LIMIT 1
) m
ORDER BY t.id
"""

# When to look again without being told. NULL: nothing waits for a time.
NEXT_DUE = f"""
SELECT extract(epoch FROM least(
    (SELECT min(due_at) FROM outbox_embedded_delivery
     WHERE consumer_group = %(group)s AND topic_id = ANY(%(topic_ids)s) AND died_at IS NULL AND due_at > {NOW}),
    (SELECT min(deliver_at) FROM outbox_embedded_delayed WHERE topic_id = ANY(%(topic_ids)s))
) - {NOW})::float8
"""


@dataclass(frozen=True, slots=True)
class Reader:
    """What one receive asks for. `tags` per topic id, None for all."""

    group: str
    topics: Sequence[StoredTopic]
    tags: Mapping[int, Iterable[str] | None]
    invisible_for: timedelta
    now: Callable[[], datetime | None]

    def parameters(self, **more: object) -> dict[str, object]:
        """Give the parameters that the statements share, and more."""
        shared = {"group": self.group, "topic_ids": [topic.id for topic in self.topics]}
        return {**shared, "invisible_for": self.invisible_for, "now": self.now(), **more}


def join(connection: Connection, reader: Reader, *, at_end: bool) -> None:
    """Have a group begin in topics that are new to it."""
    connection.execute(JOIN, reader.parameters(at_end=at_end))


def take(connection: Connection, reader: Reader, limit: int) -> list[ReadRow]:
    """Take up to `limit` messages: those due again first, then from the queues with unread ones."""
    if delayed := [topic.id for topic in reader.topics if topic.type is TopicType.DELAY]:
        log.move_delayed(connection, delayed, limit=max(limit, SCAN), now=reader.now())
    found = _take_due(connection, reader, limit)
    is_moving = True
    while len(found) < limit and is_moving:
        is_moving = False
        for topic_id, queue in connection.execute(UNREAD, reader.parameters()).fetchall():
            rows = _read_on(connection, reader, topic_id, queue, limit - len(found))
            is_moving = is_moving or bool(rows)
            found += [row for row in rows if row.delivery_id is not None]
            if len(found) == limit:
                return found
        if is_moving and any(topic.type is TopicType.FIFO for topic in reader.topics):
            found += _take_due(connection, reader, limit - len(found))
    return found


def seconds_to_next(connection: Connection, reader: Reader) -> float | None:
    """Give the time until something is due that nobody will announce."""
    row = connection.execute(NEXT_DUE, reader.parameters()).fetchone()
    return None if row is None or row[0] is None else max(0.0, row[0])


def _take_due(connection: Connection, reader: Reader, limit: int) -> list[ReadRow]:
    return _rows(connection, TAKE_DUE, reader.parameters(limit=limit))


def _read_on(connection: Connection, reader: Reader, topic_id: int, queue: int, limit: int) -> list[ReadRow]:
    tags = reader.tags[topic_id]
    kind = next(topic.type for topic in reader.topics if topic.id == topic_id)
    parameters = reader.parameters(
        topic_id=topic_id,
        queue=queue,
        limit=limit,
        tags=tags if tags is None else list(tags),
        scan=limit if tags is None else max(limit, SCAN),
        is_fifo=kind is TopicType.FIFO,
        ahead=AHEAD,
    )
    return _rows(connection, READ_ON, parameters)


def _rows(connection: Connection, statement: str, parameters: dict[str, object]) -> list[ReadRow]:
    return [ReadRow(*row) for row in connection.execute(statement, parameters, binary=True)]

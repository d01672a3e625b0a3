"""
Reading by consumer groups: an offset per queue, and a delivery row for each message that was read and not finished.

A receiver locks a group's offset only for the statement that moves it (SKIP LOCKED: the next receiver takes another
queue meanwhile), and the delivery rows are written by that statement: a message is either still ahead of the offset or
has a delivery row, whenever a process dies.

One statement looks what there is, and only those follow that have something to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.embedded import log, orphans
from outbox.embedded.clock import NOW
from outbox.embedded.rows import ReadRow
from outbox.embedded.topics import StoredTopic
from outbox.message import TopicType

MOVED_AT_ONCE = 500  # delayed messages, at least
AHEAD = 1000  # of a fifo queue a group reads so far past messages that wait for their key's head
UNREAD_SHARE = 4  # where retries are due, too, one message in so many is one that nobody has read

# A group begins in a topic at its first message, or behind its last. It waits for a prune of the topic, and then no prune
# misses it (retention.py).
JOIN = f"""
WITH unpruned AS MATERIALIZED (
    SELECT pg_advisory_xact_lock_shared({Lock.BROKER_TOPIC}, id) FROM unnest(%(topic_ids)s::int[]) AS id ORDER BY id
)
INSERT INTO outbox_embedded_offset (consumer_group, topic_id, queue, pos)
SELECT %(group)s, t.id, n, CASE WHEN %(at_end)s THEN coalesce(q.last_pos, 0) ELSE 0 END
FROM outbox_embedded_topic t CROSS JOIN LATERAL generate_series(0, t.queues - 1) AS n
LEFT JOIN outbox_embedded_queue q ON q.topic_id = t.id AND q.queue = n
WHERE t.id = ANY(%(topic_ids)s) AND (SELECT count(*) FROM unpruned) > 0
ON CONFLICT DO NOTHING
"""

# What is due again, and on fifo topics the heads: a message none of whose key stands before it. An earlier one cannot turn
# up later: they are read in their order, under the lock of the offset.
IS_DUE = f"""
d.consumer_group = %(group)s AND d.topic_id = ANY(%(topic_ids)s) AND d.died_at IS NULL AND d.due_at <= {NOW}
AND (d.order_key IS NULL OR NOT EXISTS (
    SELECT FROM outbox_embedded_delivery e
    WHERE e.consumer_group = d.consumer_group AND e.topic_id = d.topic_id AND e.order_key = d.order_key
      AND e.pos < d.pos AND e.died_at IS NULL
))
"""

# Whether something is due, whether delayed messages are, which queues have messages that the group has not read, and in how
# many seconds something is due that nobody will announce (NULL: nothing waits for a time).
ROUND = f"""
SELECT
    EXISTS (SELECT FROM outbox_embedded_delivery d WHERE {IS_DUE}),
    EXISTS (SELECT FROM outbox_embedded_delayed WHERE topic_id = ANY(%(delay_ids)s) AND deliver_at <= {NOW}),
    ARRAY(
        SELECT ARRAY[o.topic_id, o.queue] FROM outbox_embedded_offset o JOIN outbox_embedded_queue q USING (topic_id, queue)
        WHERE o.consumer_group = %(group)s AND o.topic_id = ANY(%(topic_ids)s) AND o.pos < q.last_pos
    ),
    extract(epoch FROM least(
        (SELECT min(due_at) FROM outbox_embedded_delivery
         WHERE consumer_group = %(group)s AND topic_id = ANY(%(topic_ids)s) AND died_at IS NULL AND due_at > {NOW}),
        (SELECT min(deliver_at) FROM outbox_embedded_delayed WHERE topic_id = ANY(%(delay_ids)s) AND deliver_at > {NOW})
    ) - {NOW})::float8
"""

# Moves the offset to the last message it takes; where those are all there are, to the queue's last position: what the snapshot
# shows is a beginning of the queue without a gap to be filled later (log.py). One row without an id: the offset moved, and there
# is nothing to hand out yet; in place of an attempt it has how many messages wait for being the heads of their keys.
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
    SELECT m.* FROM place CROSS JOIN LATERAL (
        SELECT * FROM outbox_embedded_message
        WHERE topic_id = %(topic_id)s AND queue = %(queue)s AND pos > place.pos
        ORDER BY pos LIMIT (SELECT messages FROM room)
    ) m
),
next AS (
    SELECT CASE WHEN count(*) < (SELECT messages FROM room) THEN greatest(max(pos), (
        SELECT last_pos FROM outbox_embedded_queue WHERE topic_id = %(topic_id)s AND queue = %(queue)s
    )) ELSE max(pos) END AS pos FROM seen
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
    FROM seen ORDER BY pos
    RETURNING id, pos, attempt, is_held
)
SELECT h.id, coalesce(h.attempt, (SELECT count(*) FROM seen)), s.topic_id, s.message_id, s.key, s.tag, s.headers, s.body,
    s.stored_at
FROM moved LEFT JOIN (held h JOIN seen s ON h.is_held AND s.pos = h.pos) ON true
ORDER BY h.pos
"""

# NULLs behind the attempt: the message is gone.
TAKE_DUE = f"""
WITH due AS (
    SELECT d.id FROM outbox_embedded_delivery d WHERE {IS_DUE}
    ORDER BY d.due_at, d.id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
),
taken AS (
    UPDATE outbox_embedded_delivery d SET attempt = attempt + 1, is_held = true, due_at = {NOW} + %(invisible_for)s
    FROM due WHERE d.id = due.id RETURNING d.id, d.topic_id, d.queue, d.pos, d.attempt
)
SELECT t.id, t.attempt, m.topic_id, m.message_id, m.key, m.tag, m.headers, m.body, m.stored_at
FROM taken t LEFT JOIN LATERAL (
    SELECT * FROM outbox_embedded_message m
    WHERE m.topic_id = t.topic_id AND m.queue = t.queue AND m.pos = t.pos LIMIT 1
) m ON true
ORDER BY t.id
"""


@dataclass(frozen=True, slots=True)
class Reader:
    """What one receive asks for. `turn` counts the receives."""

    group: str
    topics: Sequence[StoredTopic]
    invisible_for: timedelta
    turn: int
    now: Callable[[], datetime | None]

    @property
    def reads(self) -> tuple[str, tuple[int, ...]]:
        """The group, and the ids of its topics."""
        return self.group, tuple(topic.id for topic in self.topics)

    def parameters(self, **more: object) -> dict[str, object]:
        """Return the parameters that the statements share, and more."""
        shared = {"group": self.group, "topic_ids": [topic.id for topic in self.topics]}
        return {**shared, "invisible_for": self.invisible_for, "now": self.now(), **more}

    def of_type(self, kind: TopicType) -> set[int]:
        """Return the ids of the topics of a type."""
        return {topic.id for topic in self.topics if topic.type is kind}

    def room_for_due(self, limit: int) -> int:
        """Return how many of a receive's messages may be such as are due again, where there are unread ones, too."""
        if limit == 1:
            return min(1, self.turn % UNREAD_SHARE)
        return limit - max(1, limit // UNREAD_SHARE)


@dataclass(frozen=True, slots=True)
class Look:
    """
    What there is for a group.

    Args:
        unread: topic id and queue.
        seconds_to_next: until something is due that nobody will announce; None: nothing waits for a time.
    """

    is_due: bool
    is_delayed_due: bool
    unread: list[tuple[int, int]]
    seconds_to_next: float | None

    def __bool__(self) -> bool:
        return bool(self.is_due or self.is_delayed_due or self.unread)


@dataclass(slots=True)
class Catch:
    """What was taken. `is_moving`: at least a look later there may be more, though nothing may have been handed out."""

    rows: list[ReadRow]
    is_moving: bool = False


def join(connection: Connection, reader: Reader, *, at_end: bool) -> None:
    """Write a group's offsets in topics that are new to it."""
    connection.execute(JOIN, reader.parameters(at_end=at_end))


def look(connection: Connection, reader: Reader) -> Look:
    """Return what there is."""
    parameters = reader.parameters(delay_ids=list(reader.of_type(TopicType.DELAY)))
    [(is_due, is_delayed_due, unread, seconds)] = connection.execute(ROUND, parameters, binary=True).fetchall()
    return Look(is_due, is_delayed_due, [(topic_id, queue) for topic_id, queue in unread], seconds)


def take(connection: Connection, reader: Reader, seen: Look, limit: int) -> Catch:
    """Take up to `limit` messages of what was seen: those due again first, but for the share of the unread ones."""
    unread = list(seen.unread)
    if seen.is_delayed_due:
        moved = log.move_delayed(connection, reader.of_type(TopicType.DELAY), limit=max(limit, MOVED_AT_ONCE), now=reader.now())
        unread = list({*unread, *moved})
    catch = Catch([])
    room = reader.room_for_due(limit) if unread else limit
    if seen.is_due and room:
        _take_due(connection, reader, catch, room)
    is_more_due = seen.is_due and len(catch.rows) == room
    waiting = _read_unread(connection, reader, catch, unread, limit)
    if len(catch.rows) < limit and (is_more_due or waiting):
        _take_due(connection, reader, catch, limit - len(catch.rows))
    return catch


def _read_unread(connection: Connection, reader: Reader, catch: Catch, unread: list[tuple[int, int]], limit: int) -> int:
    """Read on in queues; return how many messages wait for being heads of their keys since: some are due now."""
    random.shuffle(unread)  # so that receivers spread over the queues and no queue waits behind a busy one
    fifo = reader.of_type(TopicType.FIFO)
    waiting = 0
    for topic_id, queue in unread:
        room = limit - len(catch.rows) - waiting
        if room <= 0:
            break
        place = {"topic_id": topic_id, "queue": queue, "limit": room, "ahead": AHEAD}
        rows = _rows(connection, READ_ON, reader.parameters(**place, is_fifo=topic_id in fifo))
        catch.is_moving = catch.is_moving or bool(rows)
        catch.rows += [row for row in rows if row.delivery_id is not None]
        waiting += sum(row.attempt for row in rows if row.delivery_id is None)
    return waiting


def _take_due(connection: Connection, reader: Reader, catch: Catch, limit: int) -> None:
    rows = _rows(connection, TAKE_DUE, reader.parameters(limit=limit))
    catch.rows += [row for row in rows if row.message_id is not None]
    if gone := [row.delivery_id for row in rows if row.message_id is None]:
        catch.is_moving = True
        orphans.drop(connection, reader.group, reader.topics, gone, now=reader.now())


def _rows(connection: Connection, statement: str, parameters: dict[str, object]) -> list[ReadRow]:
    return [ReadRow(*row) for row in connection.execute(statement, parameters, binary=True)]

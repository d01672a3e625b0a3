"""
Read messages for consumer groups: an offset per queue, and a delivery row for each message that was read but not finished.

A consumer locks a group's offset only for the statement that moves it (with SKIP LOCKED another consumer takes another queue
meanwhile). The same statement writes the delivery rows. So whenever a process dies, each message is either still after the
offset or has a delivery row.

One statement scans for available messages; others follow only where it found some.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import msgspec

from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.embedded import orphans
from outbox.embedded.clock import NOW
from outbox.embedded.rows import ReadRow
from outbox.embedded.topics import StoredTopic
from outbox.message import TopicType

MAX_WAITING = 10_000  # messages of a fifo queue that may wait for those in a handler; each look takes 1 ms for 2,000
UNREAD_SHARE = 4  # when redeliveries are due, too, one in this number of received messages is an unread one

# A group begins to read a topic at its first message, or after its last. It waits for a prune of the topic, and later prunes see
# the group (retention.py).
JOIN = f"""
WITH locked AS MATERIALIZED (
    SELECT pg_advisory_xact_lock_shared({Lock.BROKER_TOPIC}, id) FROM unnest(%(topic_ids)s::int[]) AS id ORDER BY id
)
INSERT INTO outbox_embedded_offset (consumer_group, topic_id, queue, pos)
SELECT %(group)s, t.id, n, CASE WHEN %(at_end)s THEN coalesce(q.last_pos, 0) ELSE 0 END
FROM outbox_embedded_topic t CROSS JOIN LATERAL generate_series(0, t.queues - 1) AS n
LEFT JOIN outbox_embedded_queue q ON q.topic_id = t.id AND q.queue = n
WHERE t.id = ANY(%(topic_ids)s) AND (SELECT count(*) FROM locked) > 0
ON CONFLICT DO NOTHING
"""

# Deliveries that are due, on fifo topics only the first unfinished one of each key. An earlier one cannot be added later, because
# messages are read in order, under the lock of the offset. The first ones are read once, where anything is due: to look for
# earlier ones of each due delivery takes ten times as long where many of a key wait.
IS_DUE = f"""
d.consumer_group = %(group)s AND d.topic_id = ANY(%(topic_ids)s) AND d.due_at <= {NOW}
AND (d.order_key IS NULL OR (d.topic_id, d.order_key, d.pos) IN (
    SELECT topic_id, order_key, min(pos) FROM outbox_embedded_delivery
    WHERE consumer_group = %(group)s AND topic_id = ANY(%(topic_ids)s) AND order_key IS NOT NULL GROUP BY topic_id, order_key
))
"""

# Whether deliveries are due, which queues have messages that the group has not read, and after how many seconds the next delivery
# is due, which no notification announces (NULL: none).
SCAN = f"""
SELECT
    EXISTS (SELECT FROM outbox_embedded_delivery d WHERE {IS_DUE}),
    ARRAY(
        SELECT ARRAY[o.topic_id, o.queue] FROM outbox_embedded_offset o JOIN outbox_embedded_queue q USING (topic_id, queue)
        WHERE o.consumer_group = %(group)s AND o.topic_id = ANY(%(topic_ids)s) AND o.pos < q.last_pos
    ),
    extract(epoch FROM (
        SELECT min(due_at) FROM outbox_embedded_delivery
        WHERE consumer_group = %(group)s AND topic_id = ANY(%(topic_ids)s) AND due_at > {NOW}
    ) - {NOW})::float8
"""

# Moves the offset to the last message taken; if no more are visible, to the last position of the queue, since positions before it
# cannot be filled later (log.py). A row without an id says that the offset moved but no message can be delivered yet; its count
# is the number of messages read, which wait for their turn among the messages of their keys.
READ_ON = f"""
WITH place AS MATERIALIZED (
    SELECT pos FROM outbox_embedded_offset
    WHERE consumer_group = %(group)s AND topic_id = %(topic_id)s AND queue = %(queue)s
    FOR UPDATE SKIP LOCKED
),
room AS (
    SELECT CASE WHEN %(is_fifo)s THEN greatest(0, least(%(limit)s, %(max_waiting)s - (
        SELECT count(*) FROM outbox_embedded_delivery
        WHERE consumer_group = %(group)s AND topic_id = %(topic_id)s AND queue = %(queue)s
          AND order_key IS NOT NULL
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
        (consumer_group, topic_id, queue, pos, order_key, delivery_count, due_at)
    SELECT %(group)s, %(topic_id)s, %(queue)s, pos,
           CASE WHEN %(is_fifo)s THEN hashtextextended(key, 0) END,
           CASE WHEN %(is_fifo)s THEN 0 ELSE 1 END,
           CASE WHEN %(is_fifo)s THEN {NOW} ELSE {NOW} + %(invisible_for)s END
    FROM seen ORDER BY pos
    RETURNING id, pos, delivery_count
)
SELECT held.id, coalesce(held.delivery_count, (SELECT count(*) FROM seen)), seen.topic_id, seen.message_id, seen.key, seen.tag,
    seen.headers, seen.body, seen.stored_at
FROM moved LEFT JOIN (held JOIN seen ON held.delivery_count > 0 AND seen.pos = held.pos) ON true
ORDER BY held.pos
"""

# NULLs after the delivery count mean that the message is gone.
TAKE_DUE = f"""
WITH due AS (
    SELECT d.id FROM outbox_embedded_delivery d WHERE {IS_DUE}
    ORDER BY d.due_at, d.id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
),
taken AS (
    UPDATE outbox_embedded_delivery d SET delivery_count = delivery_count + 1, due_at = {NOW} + %(invisible_for)s
    FROM due WHERE d.id = due.id RETURNING d.id, d.topic_id, d.queue, d.pos, d.delivery_count
)
SELECT taken.id, taken.delivery_count, m.topic_id, m.message_id, m.key, m.tag, m.headers, m.body, m.stored_at
FROM taken LEFT JOIN LATERAL (
    SELECT * FROM outbox_embedded_message
    WHERE topic_id = taken.topic_id AND queue = taken.queue AND pos = taken.pos LIMIT 1
) m ON true
ORDER BY taken.id
"""


class Reader(msgspec.Struct, frozen=True):
    """The arguments of one receive. `number` counts the receives."""

    group: str
    topics: Sequence[StoredTopic]
    invisible_for: timedelta
    number: int
    now: Callable[[], datetime | None]

    @property
    def reads(self) -> tuple[str, tuple[int, ...]]:
        """The group, and the ids of its topics."""
        return self.group, tuple(topic.id for topic in self.topics)

    def parameters(self, **more: object) -> dict[str, object]:
        """Return the parameters that all statements share, and those given."""
        shared = {"group": self.group, "topic_ids": [topic.id for topic in self.topics]}
        return {**shared, "invisible_for": self.invisible_for, "now": self.now(), **more}

    def due_limit(self, limit: int) -> int:
        """Return how many redeliveries a receive may return when there are unread messages, too."""
        if limit == 1:
            return min(1, self.number % UNREAD_SHARE)
        return limit - max(1, limit // UNREAD_SHARE)


class ScanResult(msgspec.Struct, frozen=True):
    """
    What a scan has found for a group.

    Args:
        unread: topic id and number of each queue with unread messages.
        seconds_to_next: time until the next delivery is due; None if there is none.
    """

    is_due: bool
    unread: list[tuple[int, int]]
    seconds_to_next: float | None

    def __bool__(self) -> bool:
        return bool(self.is_due or self.unread)


class Received(msgspec.Struct):
    """The messages that a receive has taken. `may_have_more`: another scan may find more, even if there are no rows."""

    rows: list[ReadRow]
    may_have_more: bool = False


def join(connection: Connection, reader: Reader, *, at_end: bool) -> None:
    """Insert a group's offsets in topics that it has not read before."""
    connection.execute(JOIN, reader.parameters(at_end=at_end))


def scan(connection: Connection, reader: Reader) -> ScanResult:
    """Return what is available for a group."""
    [(is_due, unread, seconds)] = connection.execute(SCAN, reader.parameters(), binary=True).fetchall()
    return ScanResult(is_due, [(topic_id, queue) for topic_id, queue in unread], seconds)


def take(connection: Connection, reader: Reader, seen: ScanResult, limit: int) -> Received:
    """Take up to `limit` messages of those that a scan found: redeliveries first, except for the share of unread ones."""
    unread = list(seen.unread)
    received = Received([])
    room = reader.due_limit(limit) if unread else limit
    if seen.is_due and room:
        _take_due(connection, reader, received, room)
    is_more_due = seen.is_due and len(received.rows) == room
    waiting = _read_unread(connection, reader, received, unread, limit)
    if len(received.rows) < limit and (is_more_due or waiting):
        _take_due(connection, reader, received, limit - len(received.rows))
    return received


def _read_unread(connection: Connection, reader: Reader, received: Received, unread: list[tuple[int, int]], limit: int) -> int:
    """Read queues; return how many messages read on fifo topics wait for their turn: some of them are due now."""
    random.shuffle(unread)  # so that consumers spread over the queues, and a busy queue does not keep others waiting
    fifo = {topic.id for topic in reader.topics if topic.type is TopicType.FIFO}
    waiting = 0
    for topic_id, queue in unread:
        room = limit - len(received.rows) - waiting
        if room <= 0:
            break
        position = {"topic_id": topic_id, "queue": queue, "limit": room, "max_waiting": MAX_WAITING}
        rows = _rows(connection, READ_ON, reader.parameters(**position, is_fifo=topic_id in fifo))
        received.may_have_more = received.may_have_more or bool(rows)
        received.rows += [row for row in rows if row.delivery_id is not None]
        waiting += sum(row.delivery_count for row in rows if row.delivery_id is None)
    return waiting


def _take_due(connection: Connection, reader: Reader, received: Received, limit: int) -> None:
    rows = _rows(connection, TAKE_DUE, reader.parameters(limit=limit))
    received.rows += [row for row in rows if row.message_id is not None]
    if gone := [row.delivery_id for row in rows if row.message_id is None]:
        received.may_have_more = True
        orphans.drop(connection, reader.group, reader.topics, gone, now=reader.now())


def _rows(connection: Connection, statement: str, parameters: dict[str, object]) -> list[ReadRow]:
    return [ReadRow(*row) for row in connection.execute(statement, parameters, binary=True)]

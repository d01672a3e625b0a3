"""
Reads messages for consumer groups. A group has an offset in each queue, and a delivery row for each unfinished message.

A message is unread while its position is after the group's offset. To read it is to move the offset past it and to write its
delivery row. It is then unfinished until it is acknowledged. A delivery is due if a consumer may take it: before its first
delivery, or when the consumer that took it last no longer holds it.

A consumer locks a group's offset only for the statement that moves the offset; with SKIP LOCKED, other consumers read other
queues meanwhile. The same statement writes the delivery rows. So whenever a process dies, each message is either still unread or
has a delivery row.

One statement scans for available messages; other statements follow only if it has found some.
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

# The maximum number of messages of a fifo queue that wait for earlier ones of their keys. A scan takes 1 ms for 2,000 of them.
MAX_WAITING = 10_000
UNREAD_ONE_IN = 4  # if deliveries are due and messages are unread, about one in this number of messages received is an unread one

# Stores the offsets with which a group begins to read topics: before the first message, or (`at_end`) after the last. With the
# advisory lock, the statement waits until a running prune of the topics has ended; later prunes see the group (retention.py).
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

# A condition for deliveries that are due; on fifo topics, only for the first unfinished one of each key. No earlier one can be
# added later, because messages are read in order, under the lock of the offset. The subquery finds the first ones of all keys at
# once. If many deliveries of a key wait, a search for earlier ones of each due delivery would take ten times as long.
IS_DUE = f"""
d.consumer_group = %(group)s AND d.topic_id = ANY(%(topic_ids)s) AND d.due_at <= {NOW}
AND (d.order_key IS NULL OR (d.topic_id, d.order_key, d.pos) IN (
    SELECT topic_id, order_key, min(pos) FROM outbox_embedded_delivery
    WHERE consumer_group = %(group)s AND topic_id = ANY(%(topic_ids)s) AND order_key IS NOT NULL GROUP BY topic_id, order_key
))
"""

# Returns whether deliveries are due, which queues have unread messages, and after how many seconds the next delivery is due
# (NULL: none). The consumer must scan again by then, because no notification announces that delivery.
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

# Reads messages of a queue, and moves the offset to the last one. If no more are visible, moves the offset to the last position
# of the queue, since positions before that cannot be filled later (log.py). Returns no row if the offset was not moved.
#
# If the topic is not a fifo one, returns the messages, each with a delivery that this consumer holds. On a fifo topic, the new
# deliveries are not held, but due at once (the statement calls both kinds `held`); TAKE_DUE takes those that wait for no earlier
# message of their key. The statement then returns a single row without an id, whose count is the number of messages read. If the
# offset was moved over empty positions only, it returns such a row with the count 0 on any topic.
READ_UNREAD = f"""
WITH locked_offset AS MATERIALIZED (
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
    SELECT m.* FROM locked_offset CROSS JOIN LATERAL (
        SELECT * FROM outbox_embedded_message
        WHERE topic_id = %(topic_id)s AND queue = %(queue)s AND pos > locked_offset.pos
        ORDER BY pos LIMIT (SELECT messages FROM room)
    ) m
),
next AS (
    SELECT CASE WHEN count(*) < (SELECT messages FROM room) THEN greatest(max(pos), (
        SELECT last_pos FROM outbox_embedded_queue WHERE topic_id = %(topic_id)s AND queue = %(queue)s
    )) ELSE max(pos) END AS pos FROM seen
),
moved AS (
    UPDATE outbox_embedded_offset o SET pos = next.pos FROM locked_offset, next
    WHERE o.consumer_group = %(group)s AND o.topic_id = %(topic_id)s AND o.queue = %(queue)s AND locked_offset.pos < next.pos
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

# Takes due deliveries, so that this consumer holds them. NULLs after the delivery count mean that the message's row is missing.
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


class PreparedReceive(msgspec.Struct, frozen=True):
    """
    The arguments of one receive.

    Args:
        receive_number: how many receives this broker client has begun before.
        now: returns the time that a test has set. If it returns None, the statements use the database's clock.
    """

    group: str
    topics: Sequence[StoredTopic]
    invisible_for: timedelta
    receive_number: int
    now: Callable[[], datetime | None]

    @property
    def group_and_topic_ids(self) -> tuple[str, tuple[int, ...]]:
        """The group, and the ids of its topics."""
        return self.group, tuple(topic.id for topic in self.topics)

    def parameters(self, **more: object) -> dict[str, object]:
        """Return the parameters that all statements share, and additional ones."""
        shared = {"group": self.group, "topic_ids": [topic.id for topic in self.topics]}
        return {**shared, "invisible_for": self.invisible_for, "now": self.now(), **more}

    def due_limit(self, limit: int) -> int:
        """Return how many due deliveries a receive may take before it reads unread messages, if there are any."""
        if limit == 1:
            return min(1, self.receive_number % UNREAD_ONE_IN)
        return limit - max(1, limit // UNREAD_ONE_IN)


class ScanResult(msgspec.Struct, frozen=True):
    """
    The result of a scan for a group. It is true (`bool`) if any message may be available.

    Args:
        is_due: whether deliveries are due.
        unread: topic id and number of each queue with unread messages.
        seconds_to_next: the time until the next delivery is due; None if there is none.
    """

    is_due: bool
    unread: list[tuple[int, int]]
    seconds_to_next: float | None

    def __bool__(self) -> bool:
        return bool(self.is_due or self.unread)


class Received(msgspec.Struct):
    """The messages that a receive has taken. `may_have_more`: even if there are none, another scan may find some."""

    rows: list[ReadRow]
    may_have_more: bool = False


def join(connection: Connection, request: PreparedReceive, *, at_end: bool) -> None:
    """Store a group's offsets in topics that it has not read before."""
    connection.execute(JOIN, request.parameters(at_end=at_end))


def scan(connection: Connection, request: PreparedReceive) -> ScanResult:
    """Return which messages are available for a group."""
    [(is_due, unread, seconds)] = connection.execute(SCAN, request.parameters(), binary=True).fetchall()
    return ScanResult(is_due, [(topic_id, queue) for topic_id, queue in unread], seconds)


def take(connection: Connection, request: PreparedReceive, available: ScanResult, limit: int) -> Received:
    """Take up to `limit` of the available messages: due deliveries first, but also a share of unread messages."""
    unread = list(available.unread)
    received = Received([])
    room = request.due_limit(limit) if unread else limit
    if available.is_due and room:
        _take_due(connection, request, received, room)
    is_more_due = available.is_due and len(received.rows) == room
    not_taken = _read_unread(connection, request, received, unread, limit)
    if len(received.rows) < limit and (is_more_due or not_taken):
        _take_due(connection, request, received, limit - len(received.rows))
    return received


def _read_unread(
    connection: Connection, request: PreparedReceive, received: Received, unread: list[tuple[int, int]], limit: int
) -> int:
    """Read queues. Return how many messages of fifo topics were read, which `received` lacks: TAKE_DUE may take some of them."""
    random.shuffle(unread)  # so that consumers spread over the queues, and a busy queue does not delay others
    fifo = {topic.id for topic in request.topics if topic.type is TopicType.FIFO}
    not_taken = 0
    for topic_id, queue in unread:
        room = limit - len(received.rows) - not_taken
        if room <= 0:
            break
        position = {"topic_id": topic_id, "queue": queue, "limit": room, "max_waiting": MAX_WAITING}
        rows = _rows(connection, READ_UNREAD, request.parameters(**position, is_fifo=topic_id in fifo))
        received.may_have_more = received.may_have_more or bool(rows)
        received.rows += [row for row in rows if row.delivery_id is not None]
        not_taken += sum(row.delivery_count for row in rows if row.delivery_id is None)
    return not_taken


def _take_due(connection: Connection, request: PreparedReceive, received: Received, limit: int) -> None:
    rows = _rows(connection, TAKE_DUE, request.parameters(limit=limit))
    received.rows += [row for row in rows if row.message_id is not None]
    if without_message := [row.delivery_id for row in rows if row.message_id is None]:
        received.may_have_more = True
        orphans.drop(connection, request.group, request.topics, without_message, now=request.now())


def _rows(connection: Connection, statement: str, parameters: dict[str, object]) -> list[ReadRow]:
    return [ReadRow(*row) for row in connection.execute(statement, parameters, binary=True)]

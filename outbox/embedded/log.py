"""
Messages become visible: the only way into a queue.

A group's offset says how far it has read a queue, so a message that turned up behind an offset would be lost to the
group. It cannot: the statement that makes messages visible takes their positions by an UPDATE of the queue's row, and
holds that row's lock until its transaction has ended. So a writer takes positions after the one before it has become
visible, and whoever sees position n sees every position before n. A sequence would not do: of two statements under way
the later number can become visible first.

Writers that touch several queues take their rows in one order (ORDER BY), so they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from outbox.database import Connection
from outbox.embedded.clock import NOW
from outbox.embedded.rows import MESSAGE_ARRAYS, MESSAGE_COLUMNS, MessageRow, arrays

# Follows `WITH leaving AS (...)`, rows to be made visible: n (their order), half_id, topic_id, queue and the message.
# A message of this (id, source) that is visible already stays the only one; the position it would have had stays empty.
SHOW = f"""
counted AS (SELECT topic_id, queue, count(*) AS n FROM leaving GROUP BY topic_id, queue),
numbered AS (
    INSERT INTO outbox_embedded_queue AS q (topic_id, queue, last_pos)
    SELECT topic_id, queue, n FROM counted ORDER BY topic_id, queue
    ON CONFLICT (topic_id, queue) DO UPDATE SET last_pos = q.last_pos + excluded.last_pos
    RETURNING topic_id, queue, last_pos
),
shown AS (
    INSERT INTO outbox_embedded_message
        (topic_id, queue, pos, message_id, source, half_id, key, tag, headers, body, stored_at)
    SELECT topic_id, queue, u.last_pos - c.n + row_number() OVER (PARTITION BY topic_id, queue ORDER BY l.n),
           l.message_id, l.source, l.half_id, l.key, l.tag, l.headers, l.body, {NOW}
    FROM leaving l JOIN counted c USING (topic_id, queue) JOIN numbered u USING (topic_id, queue)
    ON CONFLICT (message_id, source) DO NOTHING
    RETURNING half_id
)
"""

# Tells consumers that want to be told to look at all they have, once per statement.
NOTIFY = "(SELECT pg_notify('outbox_embedded', '') FROM outbox_embedded_wakeup LIMIT 1)"

# Tells them which queue has new messages, once for each that is `numbered`. Where nothing is shown, nobody may be told: who moves
# what is due listens, too, and would wake itself for ever.
NOTIFY_QUEUE = "(SELECT pg_notify('outbox_embedded', topic_id || ':' || queue) FROM outbox_embedded_wakeup LIMIT 1)"

# A one-phase send. A message's place in the arrays is its place in the queue.
SEND = f"""
WITH leaving AS (
    SELECT n, NULL::bigint AS half_id, {MESSAGE_COLUMNS}
    FROM unnest({MESSAGE_ARRAYS}) WITH ORDINALITY AS m ({MESSAGE_COLUMNS}, n)
),
{SHOW}
SELECT {NOTIFY_QUEUE} FROM numbered
"""

DELAY = f"""
INSERT INTO outbox_embedded_delayed ({MESSAGE_COLUMNS}, deliver_at)
SELECT * FROM unnest({MESSAGE_ARRAYS}, %(times)b::timestamptz[])
"""

# Two consumers that come at once move different messages: the rows are locked, locked ones are skipped.
MOVE_DELAYED = f"""
WITH leaving AS (
    DELETE FROM outbox_embedded_delayed WHERE id IN (
        SELECT id FROM outbox_embedded_delayed
        WHERE topic_id = ANY(%(topic_ids)s) AND deliver_at <= {NOW}
        ORDER BY deliver_at, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    )
    RETURNING id AS n, NULL::bigint AS half_id, {MESSAGE_COLUMNS}
),
{SHOW}
SELECT topic_id, queue, {NOTIFY_QUEUE} FROM numbered
"""


def send(connection: Connection, rows: Sequence[MessageRow], *, now: datetime | None) -> None:
    """Make messages visible, in the order given within each queue."""
    connection.execute(SEND, {**arrays(rows), "now": now})


def delay(connection: Connection, rows: Sequence[MessageRow], times: Sequence[datetime]) -> None:
    """Keep messages until their times."""
    connection.execute(DELAY, {**arrays(rows), "times": list(times)})


def move_delayed(
    connection: Connection, topic_ids: Collection[int], *, limit: int, now: datetime | None
) -> list[tuple[int, int]]:
    """Make delayed messages of these topics visible whose time has come. Return the topic id and the queue of each."""
    moved = connection.execute(MOVE_DELAYED, {"topic_ids": list(topic_ids), "limit": limit, "now": now})
    return [(topic_id, queue) for topic_id, queue, _ in moved]

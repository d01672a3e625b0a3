"""
Makes messages visible. All writes to a queue use this module.

A group's offset is the last position that the group has read in a queue, so the group would never read a message that became
visible later at an earlier position. This cannot happen, because the statement that makes messages visible takes their positions
with an UPDATE of the queue's row, and holds the lock of that row until the transaction ends. So a writer takes positions only
after those of the previous writer are visible, and a reader that sees position n sees every position before n. A sequence would
not be enough: if two statements run at the same time, the one with the later numbers may commit first.

Writers that change several queues lock their rows in one order (ORDER BY), so they cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from outbox.database import Connection
from outbox.database.wakeup import HAS_ROOM
from outbox.embedded.clock import NOW
from outbox.embedded.rows import MESSAGE_ARRAYS, MESSAGE_COLUMNS, EmbeddedRow, arrays

# Follows `WITH leaving AS (...)`, which returns the rows to be made visible: n (their order), half_id, topic_id, queue and the
# message. If a message with the same id and source is visible already, no row is inserted, and the new position stays empty.
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
    SELECT topic_id, queue, last_pos - counted.n + row_number() OVER (PARTITION BY topic_id, queue ORDER BY leaving.n),
           message_id, source, half_id, key, tag, headers, body, {NOW}
    FROM leaving JOIN counted USING (topic_id, queue) JOIN numbered USING (topic_id, queue)
    ON CONFLICT (message_id, source) DO NOTHING
    RETURNING half_id
)
"""

# Notifies waiting consumers to scan all their queues. There is one notification per statement.
NOTIFY = f"(SELECT pg_notify('outbox_embedded', '') FROM outbox_embedded_wakeup WHERE {HAS_ROOM} LIMIT 1)"

# Notifies waiting consumers of each queue in `numbered`, because these queues have new messages.
NOTIFY_QUEUE = f"""
(SELECT pg_notify('outbox_embedded', topic_id || ':' || queue) FROM outbox_embedded_wakeup WHERE {HAS_ROOM} LIMIT 1)
"""

# A one-phase send. Messages get their positions in the order of the arrays.
SEND = f"""
WITH leaving AS (
    SELECT n, NULL::bigint AS half_id, {MESSAGE_COLUMNS}
    FROM unnest({MESSAGE_ARRAYS}) WITH ORDINALITY AS m ({MESSAGE_COLUMNS}, n)
),
{SHOW}
SELECT {NOTIFY_QUEUE} FROM numbered
"""


def send(connection: Connection, rows: Sequence[EmbeddedRow], *, now: datetime | None) -> None:
    """Make messages visible, in the order given within each queue."""
    connection.execute(SEND, {**arrays(rows), "now": now})

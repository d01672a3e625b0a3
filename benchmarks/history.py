"""Messages that wait: written in bulk, as `publish()` would have written them one by one."""

from __future__ import annotations

from outbox.database import Connection

BODY = b'{"order_id":536365,"customer":"17850","total":"139.12","lines":[{"stock_code":"85123A","quantity":6}]}'
HEADERS = '{"ce-type":"BenchOrder","ce-typeversion":"1","ce-tag":"placed","content-type":"application/json"}'

# A uuid7 from the clock: 48 bits of milliseconds, version and variant, the rest random.
FILL = """
WITH m AS (
    INSERT INTO outbox_message (id, topic_id, key, headers, body)
    SELECT (lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0')
            || '7' || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid,
           (%(topics)s::int[])[1 + n %% cardinality(%(topics)s::int[])], n::text, %(headers)s, %(body)s
    FROM generate_series(1, %(count)s) n
    RETURNING id, topic_id
)
INSERT INTO outbox_ticket (message_id, topic_id) SELECT id, topic_id FROM m
"""

EMPTY = "TRUNCATE outbox_message, outbox_ticket, outbox_delayed, outbox_batch, outbox_lane"


def fill(connection: Connection, topics: list[int], count: int) -> None:
    """Write `count` messages with their tickets, over the topics in turn."""
    connection.execute(FILL, {"topics": topics, "headers": HEADERS, "body": BODY, "count": count})
    connection.execute("ANALYZE outbox_message, outbox_ticket")


def empty(connection: Connection) -> None:
    """Take all messages away."""
    connection.execute(EMPTY)

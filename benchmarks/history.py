"""Waiting messages, written in bulk as `publish()` writes them one by one."""

from __future__ import annotations

from outbox.database import Connection
from outbox.models import State

BODY = b'{"order_id":536365,"customer":"17850","total":"139.12","lines":[{"stock_code":"85123A","quantity":6}]}'
HEADERS = '{"ce-type":"BenchOrder","ce-typeversion":"1","ce-tag":"placed","content-type":"application/json"}'

# A uuid7 from the clock: 48 bits of milliseconds, version and variant, the rest random.
ID = """(lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0')
        || '7' || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid"""

FILL = f"""
WITH m AS (
    INSERT INTO outbox_message (id, topic_id, key, headers, body)
    SELECT {ID}, (%(topics)s::int[])[1 + n %% cardinality(%(topics)s::int[])], n::text, %(headers)s, %(body)s
    FROM generate_series(1, %(count)s) n
    RETURNING id, topic_id
)
INSERT INTO outbox_ticket (message_id, topic_id) SELECT id, topic_id FROM m
"""

# Messages that were sent one by one long ago: a batch each.
FILL_SENT = f"""
WITH m AS (
    INSERT INTO outbox_message (id, topic_id, key, headers, body)
    SELECT {ID}, %(topic)s, n::text, %(headers)s, %(body)s FROM generate_series(1, %(count)s) n
    RETURNING id
), l AS (
    INSERT INTO outbox_lane (topic_id, lane, last_seq) VALUES (%(topic)s, 1, %(count)s)
)
INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, state, owner, claimed_at, sent_at)
SELECT %(topic)s, 1, row_number() OVER (), ARRAY[id], {State.SENT}, 1, clock_timestamp(), clock_timestamp() FROM m
"""

EMPTY = "TRUNCATE outbox_message, outbox_ticket, outbox_delayed, outbox_batch, outbox_lane"


def fill(connection: Connection, topics: list[int], count: int) -> None:
    """Write `count` messages with their tickets, over the topics in turn."""
    connection.execute(FILL, {"topics": topics, "headers": HEADERS, "body": BODY, "count": count})
    connection.execute("ANALYZE outbox_message, outbox_ticket")


def fill_sent(connection: Connection, topic: int, count: int) -> None:
    """Write `count` messages of an empty topic, and the SENT batches of them."""
    connection.execute(FILL_SENT, {"topic": topic, "headers": HEADERS, "body": BODY, "count": count})
    connection.execute("ANALYZE outbox_message, outbox_batch")


def empty(connection: Connection) -> None:
    """Delete all messages."""
    connection.execute(EMPTY)

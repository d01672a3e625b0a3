"""
All INSERTs of message rows. A row is written once, never changed, and dropped with its daily partition. (`database/partitions.py`
moves rows that were written before their day had a partition.)

- `INSERT_WAITING`, `INSERT_DELAYED`, `INSERT_MANY`: `publish()` and its variants write messages in the caller's transaction.
- `INSERT_ROW`: `batches/half_first.py` writes a message that is sent half first together with its decided batch.
- `INSERT_TOMBSTONE`: a check-back writes a tombstone if a message has no row. A transaction that inserts the row later fails.
- `INSERT_COPY`: an operator sends a dead message again after its daily partition was dropped.
"""

from __future__ import annotations

from outbox.database.wakeup import HAS_ROOM

_INTO = "INSERT INTO outbox_message (id, topic_id, key, headers, about, body)"

INSERT_ROW = f"{_INTO} VALUES (%s, %s, %s, %s, %s, %s)"

# Insert the message row and its ticket, and wake an idle relay of the topic's broker. The ticket's values are passed again,
# because selecting them from the message row would cost a third more.
INSERT_WAITING = f"""
WITH m AS ({INSERT_ROW})
INSERT INTO outbox_ticket (message_id, topic_id, order_key) VALUES (%s, %s, %s)
RETURNING (SELECT pg_notify('outbox', %s) FROM outbox_wakeup WHERE broker = %s AND {HAS_ROOM})
"""

# Insert the message row and the time at which it is due; the relay inserts the ticket at that time.
INSERT_DELAYED = f"""
WITH m AS ({INSERT_ROW})
INSERT INTO outbox_delayed (message_id, topic_id, due_at) VALUES (%s, %s, clock_timestamp() + %s)
"""

# Insert many messages, waiting and delayed ones; tickets are inserted in the order given.
INSERT_MANY = f"""
WITH g AS (
    SELECT * FROM unnest(
        %s::uuid[], %s::int[], %s::text[], %s::text[], %s::text[], %b::bytea[], %s::boolean[], %s::interval[]
    ) WITH ORDINALITY AS g (id, topic_id, key, headers, about, body, is_ordered, wait, nth)
), m AS (
    {_INTO}
    SELECT id, topic_id, key, headers, about, body FROM g
), d AS (
    INSERT INTO outbox_delayed (message_id, due_at, topic_id)
    SELECT id, clock_timestamp() + wait, topic_id FROM g WHERE wait > interval '0'
)
INSERT INTO outbox_ticket (message_id, topic_id, order_key)
SELECT id, topic_id, CASE WHEN is_ordered THEN hashtextextended(key, topic_id) END FROM g
WHERE wait = interval '0' ORDER BY nth
RETURNING (
    SELECT count(pg_notify('outbox', topic)) FROM outbox_wakeup
    JOIN unnest(%s::text[], %s::text[]) n (topic, broker) USING (broker) WHERE {HAS_ROOM})
"""

# If an unfinished transaction has written the message row, this statement waits until that transaction ends. `is_kept`: whether
# the time in the message's id (the first 48 bits, in milliseconds) is within the retention and not too far in the future;
# otherwise no tombstone is written.
INSERT_TOMBSTONE = """
WITH asked AS (
    SELECT id, at BETWEEN date_trunc('day', clock_timestamp() - %(retention)s::interval, 'UTC')
        AND clock_timestamp() + %(ahead)s::interval AS is_kept
    FROM (SELECT %(id)s::uuid AS id,
        to_timestamp(('x' || translate(left(%(id)s::text, 13), '-', ''))::bit(48)::bigint / 1000.0) AS at) a),
written AS (
    INSERT INTO outbox_message (id, topic_id, body) SELECT id, 0, '' FROM asked WHERE is_kept
    ON CONFLICT (id) DO NOTHING RETURNING id)
SELECT is_kept, EXISTS (SELECT FROM written) FROM asked
"""

INSERT_COPY = f"""
{_INTO}
SELECT dead.message_id, topic.id, dead.key, dead.headers, dead.about, dead.body
FROM outbox_dead dead JOIN outbox_topic topic ON topic.name = dead.topic
WHERE dead.message_id = ANY(%s) ON CONFLICT DO NOTHING
"""

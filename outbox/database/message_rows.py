"""
The INSERTs of message rows. No other code writes one, and none changes one: a row is written once, and dropped with its day.
(`database/partitions.py` moves rows that were written before their day had its partition.)

- `INSERT_WAITING`, `INSERT_DELAYED`, `INSERT_MANY`: by publish, in the caller's transaction.
- `INSERT_ROW`: half first, with the decided batch (`batches/half_first.py`).
- `INSERT_TOMBSTONE`: by a check-back, in the place of a row that is not there.
- `INSERT_COPY`: a dead message that an operator has sent again, after its day was dropped.
"""

from __future__ import annotations

from outbox.database.wakeup import HAS_ROOM

_INTO = "INSERT INTO outbox_message (id, topic_id, key, headers, about, body)"

INSERT_ROW = f"{_INTO} VALUES (%s, %s, %s, %s, %s, %s)"

# The message row and its ticket; wakes the relay that is on call for the topic's broker. Both take their values from here: a
# ticket that selected them from the message row would cost a third more.
INSERT_WAITING = f"""
WITH m AS ({INSERT_ROW})
INSERT INTO outbox_ticket (message_id, topic_id, order_key) VALUES (%s, %s, %s)
RETURNING (SELECT pg_notify('outbox', %s) FROM outbox_wakeup WHERE broker = %s AND {HAS_ROOM})
"""

# The message row, and when it is due; the relay gives it its ticket then.
INSERT_DELAYED = f"""
WITH m AS ({INSERT_ROW})
INSERT INTO outbox_delayed (message_id, topic_id, due_at) VALUES (%s, %s, clock_timestamp() + %s)
"""

# The same for many messages, tickets in the order given.
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

# Waits for an open transaction that has written the message row. The first 48 bits of an id are its time in milliseconds.
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

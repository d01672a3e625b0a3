"""
What the monitor reads, each as: role, consumer_group, source, topic, lane, number.

Only rows that transactions from `low` up to, not including, `high` have written. `oldest` narrows it down by an index.
"""

from __future__ import annotations

# A row's transaction id has 32 bits; the rest follows from the next one's id, since all visible rows are older.
WRITTEN = """
(following.id - ((following.id - {table}.xmin::text::bigint) & 4294967295)) >= %(low)s
AND (following.id - ((following.id - {table}.xmin::text::bigint) & 4294967295)) < %(high)s
"""
YOUNG = "(%(oldest)s::timestamptz IS NULL OR {table}.{time} >= %(oldest)s)"
FOLLOWING = "(SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS id) following"

# A batch is written at each step; the last one is what counts. Batches are few, and no index tells when they ended.
BATCHES = """
SELECT CASE b.state WHEN 3 THEN 'sent' ELSE 'explained' END AS role, '' AS consumer_group, s.id AS source, t.name AS topic,
    b.lane, b.first_seq + u.position - 1 AS number
FROM {following}, outbox_source s, outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id
CROSS JOIN LATERAL unnest(b.message_ids) WITH ORDINALITY u(id, position)
WHERE b.state IN (3, 4, 5) AND u.position::smallint <> ALL (b.split) AND {written}
"""

INBOX = """
SELECT 'handled' AS role, i.consumer_group, i.source, i.topic, i.lane, i.number
FROM {following}, outbox_inbox i WHERE {young} AND {written}
"""

FAILED = """
SELECT d.outcome AS role, d.consumer_group, d.source, d.topic, d.lane, d.number
FROM {following}, outbox_delivery d WHERE {young} AND {written}
"""

DROPPED = """
SELECT 'dropped' AS role, d.consumer_group, '' AS source, d.topic, NULL::smallint AS lane, NULL::bigint AS number
FROM {following}, outbox_duplicate d WHERE {young} AND {written}
"""


def _of(statement: str, table: str, time: str = "") -> str:
    """Fill in what all have in common: which transactions' rows, and from which time on they can be."""
    young = YOUNG.format(table=table, time=time)
    return statement.format(following=FOLLOWING, written=WRITTEN.format(table=table), young=young)


ALL = {
    "batches": _of(BATCHES, "b"),
    "inbox": _of(INBOX, "i", "handled_at"),
    "failed": _of(FAILED, "d", "failed_at"),
    "dropped": _of(DROPPED, "d", "dropped_at"),
}

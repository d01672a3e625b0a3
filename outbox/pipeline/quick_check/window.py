"""One window of the live tables, read along their indexes into the frames."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import UUID

import psycopg

from outbox.pipeline.quick_check.frames import ENTRY, GROUP, Check
from outbox.pipeline.spark.config import Business, PipelineConfig
from outbox.pipeline.spark.sources.statements import of_marks

MARKS = "SELECT source, topic, lane, first, last FROM ({marks}) m"

# Batches that hold a message of the window, and those that hold numbers of it: what was delayed or waited long is older than
# its number.
PLACES = """
SELECT s.id, t.name, b.lane, b.first_seq + u.n - 1, u.id::text,
    CASE b.state WHEN 0 THEN 'released' WHEN 1 THEN 'claimed' WHEN 2 THEN 'prepared' WHEN 3 THEN 'sent'
        WHEN 4 THEN 'dead' WHEN 5 THEN 'skipped' END,
    b.claimed_at, coalesce(b.sent_at, b.decided_at, b.claimed_at)
FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) WITH ORDINALITY u(id, n) CROSS JOIN outbox_source s
LEFT JOIN outbox_topic t ON t.id = b.topic_id LEFT JOIN quick_marks m ON m.topic = t.name AND m.lane = b.lane
WHERE u.n::smallint <> ALL (b.split) AND (u.id >= %(first_id)s OR b.first_seq + u.n - 1 >= m.first) AND b.id IN (
    SELECT id FROM outbox_batch WHERE outbox_newest(message_ids) >= %(first_id)s
    UNION
    SELECT o.id FROM outbox_batch o JOIN outbox_topic p ON p.id = o.topic_id
    JOIN quick_marks k ON k.topic = p.name AND k.lane = o.lane AND o.first_seq + cardinality(o.message_ids) > k.first)
UNION ALL
SELECT s.id, t.name, NULL, NULL, k.message_id::text, 'waiting', NULL,
    (SELECT m.created_at FROM outbox_message m WHERE m.id = k.message_id)
FROM outbox_ticket k CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = k.topic_id WHERE k.message_id >= %(first_id)s
UNION ALL
SELECT s.id, t.name, NULL, NULL, d.message_id::text, 'delayed', NULL, d.due_at
FROM outbox_delayed d CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = d.topic_id
WHERE d.message_id >= %(first_id)s
"""

# Messages of the window's numbers that were published before it.
OLDER = "SELECT message_id FROM quick_places WHERE message_id::uuid < %(first_id)s"

MESSAGES = """
SELECT m.id::text, t.name, m.key, m.headers::jsonb ->> 'ce-type', m.about, m.created_at
FROM outbox_message m LEFT JOIN outbox_topic t ON t.id = m.topic_id WHERE m.id >= %(first_id)s AND m.topic_id <> 0
"""

INBOX = """
SELECT consumer_group, source, topic, lane, number, message_id::text, nth, handled_at
FROM outbox_inbox WHERE message_id >= %(first_id)s OR message_id = ANY(%(older)s::uuid[])
"""

ATTEMPTS = """
SELECT consumer_group, source, topic, lane, number, message_id::text, nth, outcome, failed_at
FROM outbox_delivery WHERE failed_at >= %(since)s OR message_id = ANY(%(older)s::uuid[])
UNION ALL
SELECT consumer_group, '', topic, NULL, NULL, message_id::text, nth, 'duplicate', dropped_at
FROM outbox_duplicate WHERE dropped_at >= %(since)s
"""

STORED = """
SELECT m.source, t.name, (m.headers::jsonb ->> 'ce-lane')::smallint, (m.headers::jsonb ->> 'ce-number')::bigint, m.message_id,
    m.key, m.tag, m.queue::int, m.pos, m.stored_at
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id
WHERE m.message_id >= %(first_id)s::text OR m.message_id = ANY(%(older)s)
UNION ALL
SELECT d.source, t.name, (d.headers::jsonb ->> 'ce-lane')::smallint, (d.headers::jsonb ->> 'ce-number')::bigint, d.message_id,
    d.key, d.tag, d.queue::int, 0, NULL
FROM outbox_embedded_delayed d JOIN outbox_embedded_topic t ON t.id = d.topic_id
WHERE d.message_id >= %(first_id)s::text OR d.message_id = ANY(%(older)s)
"""

# What the broker still has for a group, and what it keeps as dead letters.
HELD = """
SELECT o.consumer_group, m.source, t.name, (m.headers::jsonb ->> 'ce-lane')::smallint,
    (m.headers::jsonb ->> 'ce-number')::bigint, m.message_id, coalesce(d.attempt, 0),
    CASE WHEN d.died_at IS NULL THEN 'waiting' ELSE 'dead letter' END, coalesce(d.died_at, m.stored_at)
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id
JOIN outbox_embedded_offset o ON o.topic_id = m.topic_id AND o.queue = m.queue
LEFT JOIN outbox_embedded_delivery d ON d.consumer_group = o.consumer_group AND d.topic_id = m.topic_id
    AND d.queue = m.queue AND d.pos = m.pos
WHERE (m.message_id >= %(first_id)s::text OR m.message_id = ANY(%(older)s)) AND (m.pos > o.pos OR d.id IS NOT NULL)
"""

# What a broker that is not looked at need not have given a group, for its tag.
UNASKED = """
SELECT %(group)s::text, p.source, p.topic, p.lane, p.number, p.message_id, 0, 'filtered', p.at
FROM quick_places p JOIN outbox_message m ON m.id = p.message_id::uuid
WHERE p.topic = %(topic)s::text AND p.state = 'sent' AND NOT coalesce(m.headers::jsonb ->> 'ce-tag', '') = ANY(%(tags)s::text[])
    AND (m.id >= %(first_id)s OR m.id = ANY(%(older)s::uuid[]))
"""


@dataclass
class Looked:
    """
    What was looked at.

    Args:
        rows: frame -> how many.
        notes: what was not looked at, and why.
    """

    rows: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def fill(check: Check, config: PipelineConfig, *, since: datetime) -> Looked:
    """
    Fill all frames with what was published since then, and with what was numbered since then.

    Raises:
        WindowTooLarge: it is more than a quick check may look at.
    """
    describe(check, config)
    looked = Looked()
    arguments = {"since": since, "first_id": UUID(int=int(since.timestamp() * 1000) << 80)}
    looked.rows["marks"] = check.fill("quick_marks", MARKS.format(marks=of_marks(since).query), None)
    looked.rows["places"] = check.fill("quick_places", PLACES, arguments)
    older = [row[0] for row in check.run(OLDER, arguments).fetchall()]
    arguments["older"] = older
    wanted = [("messages", MESSAGES), ("inbox", INBOX), ("attempts", ATTEMPTS)]
    if _is_broker_here(config):
        wanted += [("broker", STORED), ("attempts", HELD)]
    elif config.seen_topics:
        looked.notes.append("The broker's tables are in another database, and were not looked at.")
    for name, query in wanted:
        looked.rows[name] = looked.rows.get(name, 0) + check.fill(f"quick_{name}", query, arguments)
    known = config if _is_broker_here(config) else replace(config, seen_topics=[])
    for group, topic, tags in known.asked_unseen():
        check.fill("quick_attempts", UNASKED, {**arguments, "group": group, "topic": topic, "tags": tags})
    for entry in config.business:
        _fill_business(check, entry, since, looked)
    return looked


def describe(check: Check, config: PipelineConfig) -> None:
    """Write down who owes what."""
    for group in config.groups:
        for topic, tags in group.topics.items():
            check.run(GROUP, [group.name, topic, tags, group.is_from_start])
    for nth, entry in enumerate(config.business):
        check.run(ENTRY, [nth, entry.name, entry.topic, entry.type, entry.about])


def _is_broker_here(config: PipelineConfig) -> bool:
    return [broker.url for broker in config.brokers] == [config.outbox.url]


def _fill_business(check: Check, entry: Business, since: datetime, looked: Looked) -> None:
    """Read the rows that owe a message; where that cannot be done, take the entry out and say why."""
    forget = "DELETE FROM quick_entries WHERE name = %s"
    if not entry.at:
        looked.notes.append(f'The rows of {entry.name} were not looked at: OUTBOX["PIPELINE"]["AUDIT"] names no AT for them.')
        check.run(forget, [entry.name])
        return
    name, about = entry.name.replace("'", "''"), entry.about.replace("'", "''")
    condition = f"({entry.where}) AND " if entry.where else ""
    query = (
        f"SELECT '{name}', '{about}:' || b.{entry.key}, b.{entry.at} "
        f"FROM {entry.table} b WHERE {condition}b.{entry.at} >= '{since.isoformat()}'"
    )
    try:
        with check.connection.transaction():
            looked.rows[entry.name] = check.fill("quick_business", query, None)
    except psycopg.Error as error:
        looked.notes.append(f"The rows of {entry.name} cannot be read: {str(error).strip().splitlines()[0]}")
        check.run(forget, [entry.name])

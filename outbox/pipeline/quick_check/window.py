"""One window of the live tables, read along their indexes into the frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from outbox.pipeline.quick_check.frames import ENTRY, GROUP, Check
from outbox.pipeline.spark.config import Business, PipelineConfig
from outbox.pipeline.spark.findings import Finding, as_finding, grouped
from outbox.pipeline.spark.sources.sane import BROKEN_BATCHES, PLAIN, TOPIC, Sql
from outbox.pipeline.spark.sources.statements import EMBEDDED_BROKER, OUTBOX, of_marks

MARKS = "SELECT source, topic, lane, first, last FROM ({marks}) m"


# Batches that hold a message of the window, and those that hold numbers of it: what was delayed or waited long is older than
# its number.
def _places(sql: Sql) -> str:
    topic, number = TOPIC.format(row="b"), f"{sql.number('b.first_seq')} + u.n - 1"
    return f"""
    SELECT s.id, {topic}, b.lane, {number}, u.id::text,
        CASE b.state WHEN 0 THEN 'released' WHEN 1 THEN 'claimed' WHEN 2 THEN 'prepared' WHEN 3 THEN 'sent'
            WHEN 4 THEN 'dead' WHEN 5 THEN 'skipped' END,
        {sql.time("b.claimed_at")}, {sql.time("coalesce(b.sent_at, b.decided_at, b.claimed_at)")}
    FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) WITH ORDINALITY u(id, n) CROSS JOIN outbox_source s
    LEFT JOIN outbox_topic t ON t.id = b.topic_id LEFT JOIN quick_marks m ON m.topic = {topic} AND m.lane = b.lane
    WHERE u.n::smallint <> ALL (b.split) AND (u.id >= %(first_id)s OR {number} >= m.first) AND b.id IN (
        SELECT id FROM outbox_batch WHERE outbox_newest(message_ids) >= %(first_id)s
        UNION
        SELECT b.id FROM outbox_batch b LEFT JOIN outbox_topic t ON t.id = b.topic_id
        JOIN quick_marks k ON k.topic = {topic} AND k.lane = b.lane
            AND {sql.number("b.first_seq")} + cardinality(b.message_ids) > k.first)
    UNION ALL
    SELECT s.id, {TOPIC.format(row="k")}, NULL, NULL, k.message_id::text, 'waiting', NULL,
        (SELECT {sql.time("m.created_at")} FROM outbox_message m WHERE m.id = k.message_id)
    FROM outbox_ticket k CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = k.topic_id
    WHERE k.message_id >= %(first_id)s
    UNION ALL
    SELECT s.id, {TOPIC.format(row="d")}, NULL, NULL, d.message_id::text, 'delayed', NULL, {sql.time("d.due_at")}
    FROM outbox_delayed d CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = d.topic_id
    WHERE d.message_id >= %(first_id)s
    """


# Messages of the window's numbers that were published before it.
OLDER = "SELECT message_id FROM quick_places WHERE message_id::uuid < %(first_id)s"


def _messages(sql: Sql) -> str:
    return f"""
    SELECT m.id::text, {TOPIC.format(row="m")}, m.key, {sql.header("m.headers", "ce-type")}, m.about, {sql.time("m.created_at")}
    FROM outbox_message m LEFT JOIN outbox_topic t ON t.id = m.topic_id WHERE m.id >= %(first_id)s AND m.topic_id <> 0
    """


def _inbox(sql: Sql) -> str:
    return f"""
    SELECT consumer_group, source, topic, lane, number, message_id::text, nth, {sql.time("handled_at")}
    FROM outbox_inbox WHERE message_id >= %(first_id)s OR message_id = ANY(%(older)s::uuid[])
    """


def _attempts(sql: Sql) -> str:
    return f"""
    SELECT consumer_group, source, topic, lane, number, message_id::text, nth, outcome, {sql.time("failed_at")}
    FROM outbox_delivery WHERE failed_at >= %(since)s OR message_id = ANY(%(older)s::uuid[])
    UNION ALL
    SELECT consumer_group, '', topic, NULL, NULL, message_id::text, nth, 'duplicate', {sql.time("dropped_at")}
    FROM outbox_duplicate WHERE dropped_at >= %(since)s
    """


def _stored(sql: Sql) -> str:
    return f"""
    SELECT m.source, t.name, {sql.header("m.headers", "ce-lane", "smallint")}, {sql.header("m.headers", "ce-number", "bigint")},
        m.message_id, m.key, m.queue::int, m.pos, {sql.time("m.stored_at")}
    FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id
    WHERE m.message_id >= %(first_id)s::text OR m.message_id = ANY(%(older)s)
    UNION ALL
    SELECT d.source, t.name, {sql.header("d.headers", "ce-lane", "smallint")}, {sql.header("d.headers", "ce-number", "bigint")},
        d.message_id, d.key, d.queue::int, 0, NULL
    FROM outbox_embedded_delayed d JOIN outbox_embedded_topic t ON t.id = d.topic_id
    WHERE d.message_id >= %(first_id)s::text OR d.message_id = ANY(%(older)s)
    """


# What the broker still has for a group, and what it keeps as dead letters.
def _held(sql: Sql) -> str:
    return f"""
    SELECT o.consumer_group, m.source, t.name, {sql.header("m.headers", "ce-lane", "smallint")},
        {sql.header("m.headers", "ce-number", "bigint")}, m.message_id, coalesce(d.attempt, 0),
        CASE WHEN d.died_at IS NULL THEN 'waiting' ELSE 'dead letter' END, {sql.time("coalesce(d.died_at, m.stored_at)")}
    FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id
    JOIN outbox_embedded_offset o ON o.topic_id = m.topic_id AND o.queue = m.queue
    LEFT JOIN outbox_embedded_delivery d ON d.consumer_group = o.consumer_group AND d.topic_id = m.topic_id
        AND d.queue = m.queue AND d.pos = m.pos
    WHERE (m.message_id >= %(first_id)s::text OR m.message_id = ANY(%(older)s)) AND (m.pos > o.pos OR d.id IS NOT NULL)
    """


# Batches of the window, and rows of it that reading stumbled over.
OF_WINDOW = "outbox_newest(b.message_ids) >= %(first_id)s"
BROKEN = "SELECT * FROM ({broken}) q(stage, topic, detail, message_id) WHERE message_id >= %(first_id)s::text"

NOTHING = "No message, batch or inbox row is of this window: nothing was published, or it is gone. Nothing was proved."


@dataclass
class Looked:
    """
    What was looked at.

    Args:
        rows: frame -> how many.
        notes: what was not looked at, and why.
        broken: rows that no release of the outbox writes.
    """

    rows: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    broken: list[Finding] = field(default_factory=list)


def fill(check: Check, config: PipelineConfig, *, since: datetime, sql: Sql = PLAIN) -> Looked:
    """
    Fill all frames with what was published since then, and with what was numbered since then.

    Args:
        sql: CAREFUL takes rows that cannot be read as they are, and names them.

    Raises:
        WindowTooLarge: it is more than a quick check may look at.
        psycopg.DataError, psycopg.NotSupportedError: without care, a row cannot be read.
    """
    describe(check, config)
    looked = Looked()
    arguments = {"since": since, "first_id": UUID(int=int(since.timestamp() * 1000) << 80)}
    marks = of_marks(since, was_pruned=config.since is not None)
    looked.rows["marks"] = check.fill("quick_marks", MARKS.format(marks=marks.careful if sql.is_careful else marks.query), None)
    looked.rows["places"] = check.fill("quick_places", _places(sql), arguments)
    arguments["older"] = [row[0] for row in check.run(OLDER, arguments).fetchall()]
    is_broker_here = _is_broker_here(config)
    wanted = [("messages", _messages), ("inbox", _inbox), ("attempts", _attempts)]
    if is_broker_here:
        wanted += [("broker", _stored), ("attempts", _held)]
    elif config.seen_topics:
        looked.notes.append("The broker's tables are in another database, and were not looked at.")
    for name, query in wanted:
        looked.rows[name] = looked.rows.get(name, 0) + check.fill(f"quick_{name}", query(sql), arguments)
    looked.broken = _find_broken(check, arguments, sql, is_broker_here=is_broker_here)
    if not any(looked.rows.get(name) for name in ("places", "messages", "inbox", "broker")):
        looked.notes.append(NOTHING)
    for entry in config.business:
        _fill_business(check, entry, since, looked)
    return looked


def _find_broken(check: Check, arguments: dict[str, Any], sql: Sql, *, is_broker_here: bool) -> list[Finding]:
    queries = [BROKEN_BATCHES.format(only=OF_WINDOW)]
    if sql.is_careful:
        frames = [*OUTBOX.values(), *(EMBEDDED_BROKER.values() if is_broker_here else ())]
        queries += [BROKEN.format(broken=one.broken) for one in frames if one.broken]
    rows = [row for query in queries for row in check.run(query, arguments).fetchall()]
    return [as_finding(one) for one in grouped(rows)]


def describe(check: Check, config: PipelineConfig) -> None:
    """Write down who owes what."""
    for group in config.groups:
        for topic in group.topics:
            check.run(GROUP, [group.name, topic, group.is_from_start])
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

"""
The queries that read PostgreSQL's tables as frames in one snapshot, and the queries that find rows which no release writes.

    driver: pg_export_snapshot() -> name;  each reader: SET TRANSACTION SNAPSHOT name -> all see the same rows

The query of a frame has an integer column `part`, by which several connections share its rows; `bounds` selects the range of
`part`. Tables are first read as if all rows were sound, which is fast. If that fails, they are read again with the query
`careful`, which checks each value and replaces unreadable ones by NULL, and the query `broken` finds the rows with such values.

    headers {"ce-lane": "x"} -> careful: lane NULL; broken: ('broker', 'orders', 'their headers … are not numbers', id)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from outbox.database.locks import IDLE_SESSION_SECONDS
from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.config import Business
from outbox.pipeline.spark.findings import NO_TOPIC

KEEP_ALIVE_SECONDS = IDLE_SESSION_SECONDS / 5


@contextmanager
def keep_alive(connection: psycopg.Connection[Any], *, every: float = KEEP_ALIVE_SECONDS) -> Iterator[None]:
    """
    Run a query periodically in a thread, so that the server does not end the session as idle.

    While the process is frozen, the thread does not run either, so the server ends the session and releases its locks.

    Args:
        every: the interval in seconds.
    """
    stopped = threading.Event()

    def ping() -> None:
        while not stopped.wait(every):
            try:
                connection.execute("SELECT 1")
            except psycopg.Error:  # in a failed transaction each query fails, but it keeps the session alive, too
                if connection.closed:
                    return

    thread = threading.Thread(target=ping, name="outbox keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


EXPORT = "SELECT pg_export_snapshot()"

# What each transaction of a job begins with. Its statements contain backslashes, which a database may be set to read as escapes.
SET_UP = f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_SESSION_SECONDS}s'; SET LOCAL standard_conforming_strings = on"

# The first statement of each reading connection. PostgreSQL generates snapshot names, of hexadecimal digits and hyphens, so they
# need no quoting.
JOIN = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; SET TRANSACTION SNAPSHOT '{snapshot}'; " + SET_UP


@contextmanager
def exported_snapshot(url: str) -> Iterator[tuple[psycopg.Connection[Any], str]]:
    """
    Return a connection and the name of its snapshot, which other connections can use until the block ends.

    Raises:
        HistoryError: the database cannot be reached.
    """
    try:
        connection = psycopg.connect(url, application_name="outbox audit")
    except psycopg.Error as error:
        raise HistoryError(f"The database cannot be reached: {str(error).strip()}") from error
    with connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        [row] = connection.execute(EXPORT).fetchall()
        connection.execute(SET_UP)
        try:
            with keep_alive(connection):
                yield connection, row[0]
        finally:
            with suppress(psycopg.Error):  # if the connection was lost, its readers have reported that
                connection.rollback()


# The name of a topic, or its placeholder if its row is missing. `row`: the alias of the table that refers to it.
TOPIC = f"coalesce(t.name, '{NO_TOPIC}' || {{row}}.topic_id)"

# The range of times that all readers support.
FIRST_TIME, LAST_TIME = "1970-01-01 00:00:00+00", "9999-01-01 00:00:00+00"
HIGHEST = 1 << 60  # the limit of numbers that are read, so that sums do not overflow a bigint

# A JSON object of strings as `publish` writes it. The pattern excludes what PostgreSQL's jsonb rejects: NUL and lone surrogates.
_JSON_STRING = (
    r'"([^"\\[:cntrl:]]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r'|\\u(?!0000|[dD][89a-fA-F])[0-9a-fA-F]{4})*"'
)
_JSON_PAIR = rf"\s*{_JSON_STRING}\s*:\s*{_JSON_STRING}\s*"
JSON_OBJECT = rf"^\s*\{{({_JSON_PAIR}(,{_JSON_PAIR})*|\s*)\}}\s*$"

RANGES = {"smallint": (5, 32_767), "bigint": (18, 10**18)}  # type -> (maximum number of digits, highest value)


@dataclass(frozen=True)
class Sql:
    """SQL expressions for columns. With `is_careful`, they check values, and replace or limit those that cannot be read."""

    is_careful: bool

    def time(self, value: str) -> str:
        """Return the expression of a time; with checks, it is limited to the range that all readers support."""
        if not self.is_careful:
            return value
        return (
            f"CASE WHEN {value} > '{LAST_TIME}' THEN '{LAST_TIME}'::timestamptz "
            f"WHEN {value} < '{FIRST_TIME}' THEN '{FIRST_TIME}'::timestamptz ELSE {value} END"
        )

    def part(self, value: str) -> str:
        """Return the expression of a time in whole seconds since 1970."""
        return f"extract(epoch FROM {self.time(value)})::bigint"

    def number(self, value: str) -> str:
        """Return the expression of a number; with checks, it is limited so that sums do not overflow. NULL stays NULL."""
        return (
            f"CASE WHEN {value} IS NOT NULL THEN greatest(-{HIGHEST}, least({value}, {HIGHEST})) END"
            if self.is_careful
            else value
        )

    def header(self, headers: str, name: str, kind: str = "text") -> str:
        """Return the expression of a header; with checks, NULL if the headers are no JSON object, or a number is not one."""
        value = f"({headers}::jsonb ->> '{name}')"
        if not self.is_careful:
            return value if kind == "text" else f"{value}::{kind}"
        is_object = f"{headers} ~ '{JSON_OBJECT}'"
        if kind == "text":
            return f"CASE WHEN {is_object} THEN {value} END"
        return f"CASE WHEN {is_object} THEN CASE WHEN {is_number(value, kind)} THEN {value}::{kind} END END"


def is_number(text: str, kind: str) -> str:
    """Return the SQL condition that a text is a number of this type."""
    digits, highest = RANGES[kind]
    return f"CASE WHEN {text} ~ '^[+-]?[0-9]{{1,{digits}}}$' THEN {text}::bigint BETWEEN -{highest} AND {highest} ELSE false END"


PLAIN, CAREFUL = Sql(is_careful=False), Sql(is_careful=True)

NOT_JSON = "their headers are not a JSON object of strings"
NOT_A_NUMBER = "their headers ce-lane and ce-number are not numbers"
TIME_OUT_OF_RANGE = "their {column} is before 1970 or after 9998"


def is_out_of_range(column: str) -> str:
    """Return the SQL condition that a time is outside of the range that all readers support."""
    return f"({column} > '{LAST_TIME}' OR {column} < '{FIRST_TIME}')"


def _broken_times(table: str, column: str) -> str:
    problem = TIME_OUT_OF_RANGE.format(column=column)
    return f"SELECT 'inbox', topic, '{problem}', message_id::text FROM {table} WHERE {is_out_of_range(column)}"


# The queries for `Statement.broken`: rows that the plain query of a frame cannot read.
BROKEN_PLACES = f"""
SELECT 'outbox', {TOPIC.format(row="b")},
    'claimed_at, decided_at or sent_at of batch ' || b.id || ' is before 1970 or after 9998', u.id::text
FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) u(id) LEFT JOIN outbox_topic t ON t.id = b.topic_id
WHERE {" OR ".join(is_out_of_range(f"b.{column}") for column in ("claimed_at", "decided_at", "sent_at"))}
UNION ALL
SELECT 'outbox', {TOPIC.format(row="b")}, 'first_seq of batch ' || b.id || ' is ' || b.first_seq, u.id::text
FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) u(id) LEFT JOIN outbox_topic t ON t.id = b.topic_id
WHERE b.first_seq NOT BETWEEN 1 AND {HIGHEST}
UNION ALL
SELECT 'outbox', {TOPIC.format(row="d")}, '{TIME_OUT_OF_RANGE.format(column="due_at")}', d.message_id::text
FROM outbox_delayed d LEFT JOIN outbox_topic t ON t.id = d.topic_id WHERE {is_out_of_range("d.due_at")}
"""
BROKEN_MESSAGES = f"""
SELECT 'outbox', {TOPIC.format(row="m")}, w.what, m.id::text
FROM outbox_message m LEFT JOIN outbox_topic t ON t.id = m.topic_id CROSS JOIN LATERAL (
    SELECT '{NOT_JSON}' WHERE m.headers !~ '{JSON_OBJECT}'
    UNION ALL SELECT '{TIME_OUT_OF_RANGE.format(column="created_at")}' WHERE {is_out_of_range("m.created_at")}) w(what)
WHERE m.topic_id <> 0
"""
BROKEN_INBOX = _broken_times("outbox_inbox", "handled_at")
BROKEN_FAILED_DELIVERIES = " UNION ALL ".join(
    _broken_times(table, column)
    for table, column in (
        ("outbox_deferred", "deferred_at"),
        ("outbox_failed_delivery", "failed_at"),
        ("outbox_operator_act", "acted_at"),
        ("outbox_duplicate", "dropped_at"),
    )
)
_LANE, _NUMBER = "(m.headers::jsonb ->> 'ce-lane')", "(m.headers::jsonb ->> 'ce-number')"
BROKEN_EMBEDDED = f"""
SELECT 'broker', t.name, w.what, m.message_id
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id CROSS JOIN LATERAL (
    SELECT CASE WHEN m.headers !~ '{JSON_OBJECT}' THEN '{NOT_JSON}'
        WHEN NOT ({is_number(_LANE, "smallint")} AND {is_number(_NUMBER, "bigint")})
            AND coalesce({_LANE}, {_NUMBER}) IS NOT NULL THEN '{NOT_A_NUMBER}'
        WHEN {is_out_of_range("m.stored_at")} THEN '{TIME_OUT_OF_RANGE.format(column="stored_at")}' END) w(what)
WHERE w.what IS NOT NULL
"""

# Batches whose columns contradict each other.
BROKEN_BATCHES = f"""
SELECT 'outbox', {TOPIC.format(row="b")}, 'batch ' || b.id || ' ' || w.what, u.id::text
FROM outbox_batch b LEFT JOIN outbox_topic t ON t.id = b.topic_id CROSS JOIN LATERAL (
    SELECT 'has ' || cardinality(b.half_ids) || ' half_ids for ' || cardinality(b.message_ids) || ' messages'
        WHERE cardinality(b.half_ids) <> cardinality(b.message_ids)
    UNION ALL SELECT 'has ' || cardinality(b.half_places) || ' half_places for ' || cardinality(b.message_ids) || ' messages'
        WHERE cardinality(b.half_places) <> cardinality(b.message_ids)
    UNION ALL SELECT 'has ' || cardinality(b.order_keys) || ' order_keys for ' || cardinality(b.message_ids) || ' messages'
        WHERE cardinality(b.order_keys) <> cardinality(b.message_ids)
    UNION ALL SELECT 'refers to a position that it does not have'
        WHERE EXISTS (SELECT FROM unnest(b.split || b.open) p(n) WHERE p.n NOT BETWEEN 1 AND cardinality(b.message_ids))
    UNION ALL SELECT 'has numbers, but no lane' WHERE b.lane IS NULL AND b.first_seq IS NOT NULL
    UNION ALL SELECT 'has a lane, but no numbers' WHERE b.first_seq IS NULL AND b.lane IS NOT NULL
    UNION ALL SELECT 'has state ' || b.state || ', which does not exist' WHERE b.state NOT BETWEEN 0 AND 5) w(what)
CROSS JOIN LATERAL unnest(b.message_ids) u(id)
"""


@dataclass(frozen=True)
class Statement:
    """
    The queries of a frame, or of a part of one.

    Args:
        query: selects `part` and the frame's columns.
        bounds: selects the lowest and highest `part`.
        careful: like `query`, but tolerates rows that no release writes, and takes several times as long; empty: there is none.
        broken: selects such rows, as (stage, topic, what is wrong, message id); empty: there is no such query.
    """

    query: str
    bounds: str = "SELECT 0, 0"
    careful: str = ""
    broken: str = ""


def _statement(query: Callable[[Sql], str], bounds: str, broken: str) -> Statement:
    return Statement(query(PLAIN), bounds, query(CAREFUL), broken)


# Messages that were sent half first have neither lane nor number. A position that was split off is now in another batch. Waiting
# messages have a ticket and no batch yet. A delayed message counts as in flight until it is due, so its time is `due_at`.
def _places(sql: Sql) -> str:
    return f"""
    SELECT b.id AS part, s.id AS source, {TOPIC.format(row="b")} AS topic, b.lane,
        {sql.number("b.first_seq")} + u.position - 1 AS number, u.id::text AS message_id,
        CASE b.state WHEN 0 THEN 'released' WHEN 1 THEN 'claimed' WHEN 2 THEN 'prepared' WHEN 3 THEN 'sent'
            WHEN 4 THEN 'dead' WHEN 5 THEN 'discarded' END AS state,
        {sql.time("b.claimed_at")} AS claimed_at, {sql.time("coalesce(b.sent_at, b.decided_at, b.claimed_at)")} AS at
    FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) WITH ORDINALITY u(id, position)
    CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = b.topic_id
    WHERE u.position::smallint <> ALL (b.split)
    UNION ALL
    SELECT 0, s.id, {TOPIC.format(row="k")}, NULL, NULL, k.message_id::text, 'waiting', NULL,
        (SELECT {sql.time("m.created_at")} FROM outbox_message m WHERE m.id = k.message_id)
    FROM outbox_ticket k CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = k.topic_id
    UNION ALL
    SELECT 0, s.id, {TOPIC.format(row="d")}, NULL, NULL, d.message_id::text, 'delayed', NULL, {sql.time("d.due_at")}
    FROM outbox_delayed d CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = d.topic_id
    """


# Rows with topic 0 are tombstones, which a check-back writes in place of a message. `part` is the second in which a message was
# published.
def _messages(sql: Sql) -> str:
    return f"""
    SELECT ('x' || left(replace(m.id::text, '-', ''), 12))::bit(48)::bigint / 1000 AS part, m.id::text AS message_id,
        {TOPIC.format(row="m")} AS topic, m.key, {sql.header("m.headers", "ce-type")} AS type, m.about,
        {sql.time("m.created_at")} AS at
    FROM outbox_message m LEFT JOIN outbox_topic t ON t.id = m.topic_id WHERE m.topic_id <> 0
    """


def _inbox(sql: Sql) -> str:
    return f"""
    SELECT {sql.part("i.handled_at")} AS part, i.consumer_group, i.source, i.topic, i.lane, i.number,
        i.message_id::text AS message_id, i.delivery_count, {sql.time("i.handled_at")} AS at
    FROM outbox_inbox i
    """


# First the messages that a group knows and has not handled: deferred, dead, or discarded (which also have an inbox row). Then the
# log of its deliveries.
def _failed_deliveries(sql: Sql) -> str:
    return f"""
    SELECT 0 AS part, d.consumer_group, d.source, d.topic, d.lane, d.number, d.message_id::text AS message_id, d.delivery_count,
        CASE WHEN d.dead_at IS NULL THEN 'deferred' ELSE 'dead' END AS outcome, {sql.time("d.deferred_at")} AS at
    FROM outbox_deferred d
    UNION ALL
    SELECT 0, i.consumer_group, i.source, i.topic, i.lane, i.number, i.message_id::text, i.delivery_count, 'discarded',
        {sql.time("a.acted_at")}
    FROM outbox_operator_act a JOIN outbox_inbox i ON i.message_id = a.message_id AND i.consumer_group = a.consumer_group
    WHERE a.act = 'discarded' AND i.delivery_count = 0
    UNION ALL
    SELECT d.id, d.consumer_group, d.source, d.topic, d.lane, d.number, d.message_id::text, d.delivery_count, d.outcome,
        {sql.time("d.failed_at")}
    FROM outbox_failed_delivery d
    UNION ALL
    SELECT 0, d.consumer_group, '', d.topic, NULL, NULL, d.message_id::text, d.delivery_count, 'duplicate',
        {sql.time("d.dropped_at")}
    FROM outbox_duplicate d
    """


PLACES = _statement(_places, "SELECT min(id), max(id) FROM outbox_batch", BROKEN_PLACES)
MESSAGES = _statement(
    _messages,
    """
    SELECT ('x' || left(replace(min(id::text), '-', ''), 12))::bit(48)::bigint / 1000,
        ('x' || left(replace(max(id::text), '-', ''), 12))::bit(48)::bigint / 1000
    FROM outbox_message
    """,
    BROKEN_MESSAGES,
)
INBOX = _statement(
    _inbox,
    f"SELECT {CAREFUL.part('min(handled_at)')}, {CAREFUL.part('max(handled_at)')} FROM outbox_inbox",
    BROKEN_INBOX,
)
FAILED_DELIVERIES = _statement(
    _failed_deliveries, "SELECT min(id), max(id) FROM outbox_failed_delivery", BROKEN_FAILED_DELIVERIES
)

# The marks of lanes: the first and last number that each lane has assigned. A message gets its number when it is claimed, so
# earlier claims have lower numbers. FIRST is the first number in a pruned database: the one after the highest that was claimed
# before `since`; without such a batch, the lowest number in the table; without any batch, the number after the lane's last one,
# so that the range is empty.
MARKS = """
SELECT 0 AS part, s.id AS source, {topic} AS topic, l.lane, {first} AS first, {last} AS last
FROM outbox_lane l CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = l.topic_id
"""
FIRST = """
1 + coalesce(
    (SELECT max({seq} + cardinality(b.message_ids) - 1) FROM outbox_batch b
     WHERE b.topic_id = l.topic_id AND b.lane = l.lane AND b.claimed_at < '{since}'),
    (SELECT min({seq}) - 1 FROM outbox_batch b WHERE b.topic_id = l.topic_id AND b.lane = l.lane),
    l.last_seq)
"""

OUTBOX = {"places": PLACES, "messages": MESSAGES, "inbox": INBOX, "failed_deliveries": FAILED_DELIVERIES}

SOURCES = "SELECT id FROM outbox_source"
NOW = "SELECT clock_timestamp()"


def _embedded(sql: Sql) -> str:
    return f"""
    SELECT m.pos AS part, m.source, t.name AS topic, {sql.header("m.headers", "ce-lane", "smallint")} AS lane,
        {sql.header("m.headers", "ce-number", "bigint")} AS number, m.message_id, m.key, m.queue::int AS queue, m.pos,
        {sql.time("m.stored_at")} AS at
    FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id
    """


# Messages that the embedded broker still has for a group: not delivered yet, or delivered and not finished.
def _embedded_failed_deliveries(sql: Sql) -> str:
    return f"""
    SELECT m.pos AS part, o.consumer_group, m.source, t.name AS topic, {sql.header("m.headers", "ce-lane", "smallint")} AS lane,
        {sql.header("m.headers", "ce-number", "bigint")} AS number, m.message_id, coalesce(d.delivery_count, 0) AS delivery_count,
        'waiting' AS outcome, {sql.time("m.stored_at")} AS at
    FROM outbox_embedded_offset o
    JOIN outbox_embedded_message m ON m.topic_id = o.topic_id AND m.queue = o.queue
    JOIN outbox_embedded_topic t ON t.id = m.topic_id
    LEFT JOIN outbox_embedded_delivery d ON d.consumer_group = o.consumer_group AND d.topic_id = m.topic_id
        AND d.queue = m.queue AND d.pos = m.pos
    WHERE m.pos > o.pos OR d.id IS NOT NULL
    """


EMBEDDED_BOUNDS = "SELECT min(pos), max(pos) FROM outbox_embedded_message"
EMBEDDED = _statement(_embedded, EMBEDDED_BOUNDS, BROKEN_EMBEDDED)
EMBEDDED_FAILED_DELIVERIES = _statement(_embedded_failed_deliveries, EMBEDDED_BOUNDS, "")

EMBEDDED_BROKER = {"broker": EMBEDDED, "failed_deliveries": EMBEDDED_FAILED_DELIVERIES}

# Messages that the recorder has recorded, one row for each copy at the broker. Each first delivery (delivery_count 1) is a copy,
# since a position is recorded once. A later delivery may be the redelivery of a known copy. So if a message has n deliveries with
# the same count, and at most m deliveries with any one lower count, n - m of the n are further copies.
RECORDED = """
SELECT r.id AS part, r.source, r.topic, r.lane, r.number, r.message_id::text AS message_id, r.key,
    hashtext(r.queue) AS queue, coalesce(r.pos, 0) AS pos, coalesce(r.stored_at, r.recorded_at) AS at
FROM outbox_recorded r WHERE r.delivery_count = 1 AND r.topic = ANY(ARRAY[{topics}]::text[])
UNION ALL
SELECT 0, r.source, r.topic, r.lane, r.number, r.message_id::text, r.key,
    hashtext(r.queue), coalesce(r.pos, 0), coalesce(r.stored_at, r.recorded_at)
FROM (
    SELECT *, row_number() OVER (PARTITION BY topic, message_id, delivery_count ORDER BY id) AS copy
    FROM outbox_recorded WHERE delivery_count > 1 AND topic = ANY(ARRAY[{topics}]::text[])
) r
WHERE r.copy > (
    SELECT coalesce(max(earlier.copies), 0) FROM (
        SELECT count(*) AS copies FROM outbox_recorded f
        WHERE f.message_id = r.message_id AND f.topic = r.topic AND f.delivery_count < r.delivery_count GROUP BY f.delivery_count
    ) earlier
)
"""
RECORDED_BOUNDS = "SELECT min(id), max(id) FROM outbox_recorded"

# The progress of the recorder; it is read in the same snapshot as its rows.
RECORDED_TOPICS = "SELECT topic, began_at, read_until FROM outbox_recorded_topic WHERE topic = ANY(%s)"


def of_recorded(topics: Iterable[str]) -> Statement:
    """Return the queries for the recorded messages of these topics."""
    quoted = ", ".join("'" + topic.replace("'", "''") + "'" for topic in topics)
    return Statement(RECORDED.format(topics=quoted), RECORDED_BOUNDS)


def of_marks(since: datetime | None) -> Statement:
    """Return the queries for the numbers that each lane has assigned since a time, since earlier batches may have been pruned."""

    def query(sql: Sql) -> str:
        seq = sql.number("b.first_seq")
        first = FIRST.format(since=since.isoformat(), seq=seq) if since else "1::bigint"
        return MARKS.format(topic=TOPIC.format(row="l"), first=first, last=sql.number("l.last_seq"))

    return Statement(query(PLAIN), careful=query(CAREFUL))


def of_business(entry: Business) -> Statement:
    """Return the query for business rows. It contains SQL from settings, which are trusted."""
    at = f"b.{entry.at}" if entry.at else "NULL::timestamptz"
    where = f"WHERE ({entry.where}\n)" if entry.where else ""
    name, about = entry.name.replace("'", "''"), entry.about.replace("'", "''")
    return Statement(
        f"SELECT 0 AS part, '{name}' AS subject, '{about}:' || {entry.key} AS about, {at} AS at FROM {entry.table} b {where}"
    )

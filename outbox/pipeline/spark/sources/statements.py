"""
The queries that read PostgreSQL's tables as frames, and those that find rows which no release of the outbox writes.

Each is a SELECT with an integer column `part`, by which it is read in parallel. `bounds` is a query for its range. Tables are
first read as if all rows were sound, which is fast. On an error they are read again with checks of each value: unreadable values
become NULL, and the rows are reported.

    headers {"ce-lane": "x"} -> careful: lane NULL; broken: ('broker', 'orders', 'their headers … are not numbers', id)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from outbox.pipeline.spark.config import Business

# The placeholder of a topic whose row is missing: its number, as `#7`. `row`: the alias of the row that refers to it.
NO_TOPIC = "#"
TOPIC = f"coalesce(t.name, '{NO_TOPIC}' || {{row}}.topic_id)"

FIRST_TIME, LAST_TIME = "1970-01-01 00:00:00+00", "9999-01-01 00:00:00+00"
HIGHEST = 1 << 60  # can be added to without an overflow

# A JSON object of strings, as publish writes it and PostgreSQL's jsonb accepts it: no NUL, surrogates only in pairs.
_TEXT = (
    r'"([^"\\[:cntrl:]]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r'|\\u(?!0000|[dD][89a-fA-F])[0-9a-fA-F]{4})*"'
)
_PAIR = rf"\s*{_TEXT}\s*:\s*{_TEXT}\s*"
OBJECT = rf"^\s*\{{({_PAIR}(,{_PAIR})*|\s*)\}}\s*$"

RANGES = {"smallint": (5, 32_767), "bigint": (18, 10**18)}  # type -> (digits, highest value)


@dataclass(frozen=True)
class Sql:
    """SQL expressions for columns, with checks of values or without."""

    is_careful: bool

    def time(self, value: str) -> str:
        """Return a time; with checks, limited to the range that every reader supports."""
        if not self.is_careful:
            return value
        return (
            f"CASE WHEN {value} > '{LAST_TIME}' THEN '{LAST_TIME}'::timestamptz "
            f"WHEN {value} < '{FIRST_TIME}' THEN '{FIRST_TIME}'::timestamptz ELSE {value} END"
        )

    def part(self, value: str) -> str:
        """Return a time in whole seconds since 1970."""
        return f"extract(epoch FROM {self.time(value)})::bigint"

    def number(self, value: str) -> str:
        """Return a number; with checks, limited so that it can be added to. NULL stays NULL."""
        return (
            f"CASE WHEN {value} IS NOT NULL THEN greatest(-{HIGHEST}, least({value}, {HIGHEST})) END"
            if self.is_careful
            else value
        )

    def header(self, headers: str, name: str, kind: str = "text") -> str:
        """Return a header from a JSON object; with checks, NULL if it is not an object, or the text is not a number."""
        found = f"({headers}::jsonb ->> '{name}')"
        if not self.is_careful:
            return found if kind == "text" else f"{found}::{kind}"
        cases = f"{headers} ~ '{OBJECT}'"
        if kind == "text":
            return f"CASE WHEN {cases} THEN {found} END"
        return f"CASE WHEN {cases} THEN CASE WHEN {is_number(found, kind)} THEN {found}::{kind} END END"


def is_number(text: str, kind: str) -> str:
    """Return an SQL condition: whether a text is a number of a type."""
    digits, highest = RANGES[kind]
    return f"CASE WHEN {text} ~ '^[+-]?[0-9]{{1,{digits}}}$' THEN {text}::bigint BETWEEN -{highest} AND {highest} ELSE false END"


PLAIN, CAREFUL = Sql(is_careful=False), Sql(is_careful=True)

NOT_JSON = "their headers are not a JSON object of strings"
NOT_A_NUMBER = "their headers ce-lane and ce-number are not numbers"
BEYOND_CALENDAR = "their {column} is before 1970 or after 9998"


def _is_beyond(column: str) -> str:
    return f"({column} > '{LAST_TIME}' OR {column} < '{FIRST_TIME}')"


def _broken_times(table: str, column: str, *, stage: str, topic: str, message: str = "message_id::text") -> str:
    what = BEYOND_CALENDAR.format(column=column)
    return f"SELECT '{stage}', {topic}, '{what}', {message} FROM {table} WHERE {_is_beyond(column)}"


BROKEN_PLACES = f"""
SELECT 'outbox', {TOPIC.format(row="b")},
    'claimed_at, decided_at or sent_at of batch ' || b.id || ' is before 1970 or after 9998', u.id::text
FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) u(id) LEFT JOIN outbox_topic t ON t.id = b.topic_id
WHERE {" OR ".join(_is_beyond(f"b.{column}") for column in ("claimed_at", "decided_at", "sent_at"))}
UNION ALL
SELECT 'outbox', {TOPIC.format(row="b")}, 'first_seq of batch ' || b.id || ' is ' || b.first_seq, u.id::text
FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) u(id) LEFT JOIN outbox_topic t ON t.id = b.topic_id
WHERE b.first_seq NOT BETWEEN 1 AND {HIGHEST}
UNION ALL
SELECT 'outbox', {TOPIC.format(row="d")}, '{BEYOND_CALENDAR.format(column="due_at")}', d.message_id::text
FROM outbox_delayed d LEFT JOIN outbox_topic t ON t.id = d.topic_id WHERE {_is_beyond("d.due_at")}
"""
BROKEN_MESSAGES = f"""
SELECT 'outbox', {TOPIC.format(row="m")}, w.what, m.id::text
FROM outbox_message m LEFT JOIN outbox_topic t ON t.id = m.topic_id CROSS JOIN LATERAL (
    SELECT '{NOT_JSON}' WHERE m.headers !~ '{OBJECT}'
    UNION ALL SELECT '{BEYOND_CALENDAR.format(column="created_at")}' WHERE {_is_beyond("m.created_at")}) w(what)
WHERE m.topic_id <> 0
"""
BROKEN_INBOX = _broken_times("outbox_inbox", "handled_at", stage="inbox", topic="topic")
BROKEN_FAILED_DELIVERIES = " UNION ALL ".join(
    _broken_times(table, column, stage="inbox", topic="topic")
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
    SELECT CASE WHEN m.headers !~ '{OBJECT}' THEN '{NOT_JSON}'
        WHEN NOT ({is_number(_LANE, "smallint")} AND {is_number(_NUMBER, "bigint")})
            AND coalesce({_LANE}, {_NUMBER}) IS NOT NULL THEN '{NOT_A_NUMBER}'
        WHEN {_is_beyond("m.stored_at")} THEN '{BEYOND_CALENDAR.format(column="stored_at")}' END) w(what)
WHERE w.what IS NOT NULL
"""

# Batches whose columns contradict each other. `only`: a condition on the batch, b.
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
CROSS JOIN LATERAL unnest(b.message_ids) u(id) WHERE {{only}}
"""


@dataclass(frozen=True)
class Statement:
    """
    Args:
        query: selects `part` and the frame's columns.
        bounds: selects the lowest and highest `part`.
        careful: like `query`, but tolerates rows that no release writes; several times slower. Empty: there is none.
        broken: selects those rows: stage, topic, what is wrong, message id.
    """

    query: str
    bounds: str = "SELECT 0, 0"
    careful: str = ""
    broken: str = ""


def _statement(query: Callable[[Sql], str], bounds: str, broken: str) -> Statement:
    return Statement(query(PLAIN), bounds, query(CAREFUL), broken)


# Messages sent half first have neither lane nor number. A position that was split is in another batch. Waiting messages have no
# batch yet; a delayed message is in flight until it is due.
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


# Topic 0: tombstones, which a check-back writes instead of a message. The parts are seconds of publishing.
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


# The messages that a group knows and has not handled: deferred, dead, or discarded, which have inbox rows, too. Then its log.
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

# The numbers of a lane. If the history was pruned, they begin after those that were claimed before `since`: numbers are assigned
# when a message is claimed, so earlier claims have lower numbers.
MARKS = """
SELECT 0 AS part, s.id AS source, {topic} AS topic, l.lane, {first} AS first, {last} AS last
FROM outbox_lane l CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = l.topic_id
"""
FIRST = """
1 + coalesce(
    (SELECT max({seq} + cardinality(b.message_ids) - 1) FROM outbox_batch b
     WHERE b.topic_id = l.topic_id AND b.lane = l.lane AND b.claimed_at < '{since}'),
    {older})
"""
# If rows were pruned, a missing number may have been pruned. If none were, no number may be missing.
PRUNED = """
    (SELECT min({seq}) - 1 FROM outbox_batch b WHERE b.topic_id = l.topic_id AND b.lane = l.lane), l.last_seq"""
NEVER_PRUNED = "0"

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


# Messages that the broker still has for a group: not delivered yet, or delivered and not finished.
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


OF_EMBEDDED = "SELECT min(pos), max(pos) FROM outbox_embedded_message"
EMBEDDED = _statement(_embedded, OF_EMBEDDED, BROKEN_EMBEDDED)
EMBEDDED_FAILED_DELIVERIES = _statement(_embedded_failed_deliveries, OF_EMBEDDED, "")

EMBEDDED_BROKER = {"broker": EMBEDDED, "failed_deliveries": EMBEDDED_FAILED_DELIVERIES}

# Recorded messages. Each first delivery is a copy at the broker, since a place is recorded once. A later delivery is another copy
# only if no earlier one explains it: n deliveries with the same count are at least n copies.
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

# The progress of the recorder, in the same snapshot as its rows.
RECORDED_TOPICS = "SELECT topic, began_at, read_until FROM outbox_recorded_topic WHERE topic = ANY(%s)"


def of_recorded(topics: Iterable[str]) -> Statement:
    """Return the query for the recorded messages of topics."""
    quoted = ", ".join("'" + topic.replace("'", "''") + "'" for topic in topics)
    return Statement(RECORDED.format(topics=quoted), RECORDED_BOUNDS)


def of_marks(since: datetime | None, *, was_pruned: bool = True) -> Statement:
    """
    Return the query for the numbers that each lane has assigned since a time.

    Args:
        was_pruned: earlier batches may have been pruned. False: the history is complete.
    """

    def query(sql: Sql) -> str:
        seq = sql.number("b.first_seq")
        older = PRUNED.format(seq=seq) if was_pruned else NEVER_PRUNED
        first = FIRST.format(since=since.isoformat(), seq=seq, older=older) if since else "1::bigint"
        return MARKS.format(topic=TOPIC.format(row="l"), first=first, last=sql.number("l.last_seq"))

    return Statement(query(PLAIN), careful=query(CAREFUL))


def of_business(entry: Business) -> Statement:
    """Return the query for business rows. Its SQL comes from settings, which are trusted."""
    at = f"b.{entry.at}" if entry.at else "NULL::timestamptz"
    where = f"WHERE ({entry.where}\n)" if entry.where else ""
    name, about = entry.name.replace("'", "''"), entry.about.replace("'", "''")
    return Statement(
        f"SELECT 0 AS part, '{name}' AS subject, '{about}:' || {entry.key} AS about, {at} AS at FROM {entry.table} b {where}"
    )

"""
Rows that no release of the outbox writes: headers that are not JSON, numbers that are text, times outside of the supported range.

Tables are first read as if there were none, which is fast. On an error they are read again with checks of each value: unreadable
values become NULL, and the rows are reported.
"""

from __future__ import annotations

from dataclasses import dataclass

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

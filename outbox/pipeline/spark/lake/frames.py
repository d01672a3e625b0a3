"""
The frames that the lake keeps of a finished day: its messages with their final state, and the rows of other tables up to its end.

    Frame.query(Span(2026-11-01)) -> one SELECT; PostgreSQL and Spark calculate the same hash of a row, so equal sums of hashes
                                     mean equal rows
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Literal
from uuid import UUID


def first_id_at(time: datetime) -> str:
    """Return the smallest uuid7 of that time, as text."""
    return str(UUID(int=int(time.timestamp() * 1000) << 80))


HASH_DIGITS = 15  # hexadecimal: 60 bits, so that it is a positive bigint everywhere
NULL = "\\N"
SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Span:
    """A UTC day, and its bounds as ids and times."""

    day: date

    @property
    def first_id(self) -> str:
        return first_id_at(self._midnight(0))

    @property
    def end_id(self) -> str:
        return first_id_at(self._midnight(1))

    @property
    def end(self) -> str:
        return self._midnight(1).isoformat()

    @property
    def table(self) -> str:
        """The day's partition of the message table."""
        return f"outbox_message_{self.day:%Y%m%d}"

    def _midnight(self, days: int) -> datetime:
        return datetime(self.day.year, self.day.month, self.day.day, tzinfo=UTC) + timedelta(days=days)


@dataclass(frozen=True)
class Column:
    """A column of a frame. `sql`: its expression."""

    name: str
    sql: str
    kind: Literal["text", "int", "time", "bytes"] = "text"


@dataclass(frozen=True)
class Frame:
    """
    Args:
        rows: the FROM clause, with `{newest}` and `{place}` for conditions on message ids.
        id: the SQL of the message id, by which it is read in parts and sorted; empty: it is read in one part.
        time: the column whose day decides to which commit a row belongs; empty: the time in its id.
        key: the columns that identify a row at one moment.
    """

    name: str
    columns: tuple[Column, ...]
    rows: str
    key: tuple[str, ...]
    id: str = ""
    time: str = ""

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify a row for ever: a key may be used again after a delete or a restore."""
        return (*self.key, self.time) if self.time else self.key

    def query(self, span: Span | None, low: str | None = None, high: str | None = None) -> str:
        """
        Return a query for the rows of a day, or of a range of its ids, or for all rows.

        Args:
            low, high: ids from `low` up to, but not including, `high`; None: no bound.
        """
        if span is not None and not self.time:
            low, high = low or span.first_id, high or span.end_id
        where = ["true"] if span is None or not self.time else [f"{self.time} < '{span.end}'"]
        rows = self.rows.format(place=_bounds("u.id", low, high), newest=_bounds("outbox_newest(b.message_ids)", low, None))
        columns = ", ".join(f"{column.sql} AS {column.name}" for column in self.columns)
        where += [_bounds(self.id, low, high)] if self.id else []
        return f"SELECT {columns} {rows} WHERE {' AND '.join(where)}"


def _bounds(column: str, low: str | None, high: str | None) -> str:
    parts = [f"{column} >= '{low}'" if low else "", f"{column} < '{high}'" if high else ""]
    return " AND ".join(filter(None, parts)) or "true"


def digest_query(frame: Frame, query: str) -> str:
    """Return a query for the number of rows and the sum of their hashes."""
    parts = []
    for column in frame.columns:
        text = {
            "text": f"f.{column.name}",
            "int": f"f.{column.name}::text",
            "time": f"round(extract(epoch FROM f.{column.name}) * 1000000)::bigint::text",
            "bytes": f"md5(f.{column.name})",
        }[column.kind]
        parts.append(f"coalesce({text}, '{NULL}')")
    row = f"('x' || left(md5(concat_ws('{SEPARATOR}', {', '.join(parts)})), {HASH_DIGITS}))::bit({4 * HASH_DIGITS})::bigint"
    return f"SELECT count(*), coalesce(sum({row}), 0)::text FROM ({query}) f"  # noqa: S608


def _text(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, name) for name in names)


# A message and its state. For a finished day it changes only if an operator sends a dead message again. Topic 0: a tombstone,
# written by a check-back instead of a message. If several batches contain a message, the newest is valid.
MESSAGES = Frame(
    "messages",
    (
        Column("message_id", "m.id::text"),
        Column("topic", "coalesce(t.name, '')"),
        *(Column(name, f"m.{name}") for name in ("key", "headers", "about")),
        Column("body", "m.body", "bytes"),
        Column("created_at", "m.created_at", "time"),
        Column("source", "s.id"),
        Column(
            "state",
            """CASE WHEN m.topic_id = 0 THEN 'tombstone'
            WHEN p.state = 0 THEN CASE p.failures WHEN 0 THEN 'released' ELSE 'retrying' END
            WHEN p.state IS NOT NULL THEN ('{claimed,prepared,sent,dead,discarded}'::text[])[p.state]
            WHEN EXISTS (SELECT FROM outbox_ticket k WHERE k.message_id = m.id) THEN 'waiting'
            WHEN EXISTS (SELECT FROM outbox_delayed d WHERE d.message_id = m.id) THEN 'delayed' ELSE 'lost' END""",
        ),
        *(Column(name, f"p.{name}", "int") for name in ("batch_id", "position", "lane", "number", "attempt", "failures")),
        *(Column(name, f"p.{name}", "time") for name in ("claimed_at", "decided_at", "sent_at")),
        Column("last_error", "p.last_error"),
    ),
    """FROM outbox_message m CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = m.topic_id LEFT JOIN (
        SELECT DISTINCT ON (u.id) u.id, b.id AS batch_id, u.position, b.lane, b.first_seq + u.position - 1 AS number, b.state,
            b.attempt, b.failures, b.claimed_at, b.decided_at, b.sent_at, b.last_error
        FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) WITH ORDINALITY u(id, position)
        WHERE {newest} AND {place} AND u.position::smallint <> ALL (b.split) ORDER BY u.id, b.id DESC
    ) p ON p.id = m.id""",
    ("message_id",),
    id="m.id",
)

INBOX = Frame(
    "inbox",
    (
        *_text("consumer_group", "idempotency_key"),
        Column("message_id", "message_id::text"),
        *_text("source", "topic"),
        *(Column(name, name, "int") for name in ("lane", "number", "delivery_count")),
        Column("handled_at", "handled_at", "time"),
    ),
    "FROM outbox_inbox",
    ("consumer_group", "idempotency_key"),
    id="message_id",
    time="handled_at",
)

FAILED_DELIVERY = Frame(
    "failed_delivery",
    (
        Column("id", "id", "int"),
        Column("message_id", "message_id::text"),
        *_text("consumer_group", "source", "topic", "outcome", "fingerprint", "error", "traceback"),
        *(Column(name, name, "int") for name in ("delivery_count", "lane", "number")),
        Column("failed_at", "failed_at", "time"),
    ),
    "FROM outbox_failed_delivery",
    ("id",),
    id="message_id",
    time="failed_at",
)

DUPLICATE = Frame(
    "duplicate",
    (
        Column("id", "id", "int"),
        Column("message_id", "message_id::text"),
        *_text("consumer_group", "topic"),
        Column("delivery_count", "delivery_count", "int"),
        Column("dropped_at", "dropped_at", "time"),
    ),
    "FROM outbox_duplicate",
    ("id",),
    id="message_id",
    time="dropped_at",
)

# Failed sends; `message_ids` are separated by spaces.
FAILED_SEND = Frame(
    "failed_send",
    (
        *(Column(name, name, "int") for name in ("id", "batch_id", "attempt")),
        Column("message_ids", "array_to_string(message_ids, ' ')"),
        *_text("verdict", "reason"),
        Column("failed_at", "failed_at", "time"),
    ),
    "FROM outbox_failed_send",
    ("id",),
    time="failed_at",
)

OPERATOR_ACT = Frame(
    "operator_act",
    (
        Column("id", "id", "int"),
        Column("message_id", "message_id::text"),
        *_text("act", "topic", "consumer_group", "fingerprint", "reason", "acted_by"),
        *(Column(name, name, "int") for name in ("delivery_count", "batch_id", "attempt")),
        Column("acted_at", "acted_at", "time"),
    ),
    "FROM outbox_operator_act",
    ("id",),
    id="message_id",
    time="acted_at",
)

CHECK_BACK = Frame(
    "check_back",
    (
        Column("id", "id", "int"),
        *_text("message_id", "request_id", "asked_by", "topic", "half_id", "token", "answer", "reason", "about"),
        Column("asked", "asked", "int"),
        Column("milliseconds", "milliseconds::text"),
        Column("answered_at", "answered_at", "time"),
    ),
    "FROM outbox_check_back",
    ("id",),
    time="answered_at",
)

# Recorded messages, a row for each place. A place may be recorded again after its row has left the table, so copies are counted
# once for each place (`sources.copies`). Commits of older versions lack this frame.
RECORDED = Frame(
    "recorded",
    (
        Column("id", "id", "int"),
        Column("message_id", "message_id::text"),
        *_text("topic", "source", "key", "tag", "queue"),
        *(Column(name, name, "int") for name in ("lane", "number", "pos", "delivery_count")),
        *(Column(name, name, "time") for name in ("stored_at", "recorded_at")),
    ),
    "FROM outbox_recorded",
    ("id",),
    id="message_id",
    time="recorded_at",
)

FRAMES = {
    frame.name: frame for frame in (MESSAGES, INBOX, FAILED_DELIVERY, DUPLICATE, FAILED_SEND, OPERATOR_ACT, CHECK_BACK, RECORDED)
}
TIMED_FRAMES = {name: frame for name, frame in FRAMES.items() if frame.time}

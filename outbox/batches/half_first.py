"""
Half first: the transaction that publishes writes message row and decided batch itself, before the broker hears of the message.

The batch of one is PREPARED from the database commit on, with attempt 1 and without lane and number. Whoever writes the message
row decides: a tombstone (topic 0) in its place keeps the transaction from ever committing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db.backends.utils import CursorWrapper
from psycopg.rows import class_row

from outbox.database import Connection
from outbox.models import State

# A plain INSERT, whose conflict nobody may catch: where the check-back has put a tombstone, this transaction must not commit.
INSERT_PREPARED = f"""
WITH m AS (INSERT INTO outbox_message (id, topic_id, key, headers, about, body) VALUES (%s, %s, %s, %s, %s, %s)),
b AS (
    INSERT INTO outbox_batch (topic_id, message_ids, half_ids, state, decided_at, ends_until)
    VALUES (%s, ARRAY[%s]::uuid[], ARRAY[%s], {State.PREPARED}, clock_timestamp(), clock_timestamp() + %s::interval)
    RETURNING id)
SELECT b.id, source.id FROM b, outbox_source source
"""

# In the transaction that has written the batch, so that every one that is committed has it.
NOTE_PLACE = f"UPDATE outbox_batch SET half_places = ARRAY[%s] WHERE id = %s AND state = {State.PREPARED} AND attempt = 1"

MARK_SENT = f"""
UPDATE outbox_batch SET state = {State.SENT}, sent_at = clock_timestamp(), open = NULL
WHERE id = %s AND state = {State.PREPARED} AND attempt = 1
"""

# Waits for a transaction that has written the message row already. The first 48 bits of an id are its time in milliseconds.
WRITE_TOMBSTONE = """
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

CLOCK_AHEAD = timedelta(hours=1)
"""How far a publisher's clock may be ahead of the database's for a tombstone to be written in its message's place."""

# Its own statement: what the one before has waited for is seen by a later snapshot only. A batch of one has its only
# message's id for the newest.
READ_STEP = """
SELECT m.topic_id = 0 AS is_tombstone, b.id AS batch, b.state, b.attempt, b.half_ids[1] AS half_id,
    coalesce(b.ends_until > clock_timestamp(), false) AS is_being_ended
FROM outbox_message m
LEFT JOIN outbox_batch b ON outbox_newest(b.message_ids) = %(id)s AND cardinality(b.message_ids) = 1
WHERE m.id = %(id)s
"""


class Tombstone(enum.Enum):
    """
    What became of a tombstone.

    UNWRITTEN: the time in the message's id is one of which nothing is kept, so that a missing row proves nothing.
    """

    WRITTEN = enum.auto()
    ROW_IS_THERE = enum.auto()
    UNWRITTEN = enum.auto()


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """The batch that a transaction has written. `source`: the stable id of its database."""

    batch: int
    source: str


@dataclass(frozen=True, slots=True)
class HalfFirstStep:
    """
    Where a message stands that went half first. The batch's fields are None where it has none.

    Args:
        is_being_ended: whoever decided it, or took it over, may end its half message now.
    """

    is_tombstone: bool
    batch: int | None
    state: int | None
    attempt: int | None
    half_id: str | None
    is_being_ended: bool


def insert_prepared(
    cursor: CursorWrapper,
    *,
    message_id: UUID,
    topic_id: int,
    key: str,
    headers: str,
    about: str | None,
    body: bytes,
    half_id: str,
    window: timedelta | None,
) -> PreparedRow:
    """
    Write message row and batch into the open transaction.

    Args:
        cursor: Django's, so that the caller's transaction, its logs and its errors are the caller's own.
        window: how long the caller may end the half message. None: at any time.

    Raises:
        django.db.IntegrityError: a tombstone is there; the transaction is broken.
    """
    values: list[Any] = [message_id, topic_id, key, headers, about, body, topic_id, message_id, half_id, window]
    cursor.execute(INSERT_PREPARED, values)
    row = cursor.fetchone()
    assert row is not None, "outbox_source is empty; its row is written by the first migration"
    return PreparedRow(*row)


def note_half_first_place(cursor: CursorWrapper, batch_id: int, place: str) -> None:
    """Note where the broker has stored the half message, in the transaction that has written the batch."""
    cursor.execute(NOTE_PLACE, [place, batch_id])


def mark_half_first_sent(cursor: CursorWrapper, batch_id: int) -> bool:
    """
    Mark the batch SENT, its half message being committed.

    Returns:
        False where the sweep was first: it has marked the batch, or sends the message again.
    """
    cursor.execute(MARK_SENT, [batch_id])
    return bool(cursor.rowcount)


def write_tombstone(connection: Connection, message_id: UUID, *, retention: timedelta) -> Tombstone:
    """
    Write a tombstone in the place of a message row, so that its transaction can never commit.

    Args:
        retention: messages are kept that long, and to the end of their UTC day.

    Raises:
        psycopg.errors.LockNotAvailable: a transaction has written the row and is still open.
        psycopg.errors.CheckViolation: no partition takes the row.
    """
    values = {"id": message_id, "retention": retention, "ahead": CLOCK_AHEAD}
    is_kept, is_written = connection.execute(WRITE_TOMBSTONE, values).fetchone() or (False, False)
    if not is_kept:
        return Tombstone.UNWRITTEN
    return Tombstone.WRITTEN if is_written else Tombstone.ROW_IS_THERE


def read_half_first(connection: Connection, message_id: UUID) -> HalfFirstStep | None:
    """Return where a message stands that went half first; None: its row is gone."""
    return connection.cursor(row_factory=class_row(HalfFirstStep)).execute(READ_STEP, {"id": message_id}).fetchone()

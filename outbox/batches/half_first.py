"""
Half first: the publisher's transaction sends the half message, and writes the message row with a batch that is already decided.

The batch has one message. When the transaction commits, it is PREPARED, with attempt 1, and without lane and number. The message
row is the decision to commit the half message. If a check-back has written a tombstone (a row with topic 0) with the message's id
first, the transaction can never commit.
"""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from django.db import IntegrityError, connections
from django.db.backends.utils import CursorWrapper
from psycopg.rows import namedtuple_row

from outbox.database import Connection
from outbox.database.identity import no_identity
from outbox.database.locks import Lock
from outbox.database.message_rows import INSERT_ROW, INSERT_TOMBSTONE
from outbox.errors import HalfNotStored
from outbox.models import State

if TYPE_CHECKING:
    from outbox.publishing.draft import Draft

# Write the message row and its decided batch. There is no ON CONFLICT, because this transaction must fail if a check-back has
# written a tombstone. No process waits for the advisory lock, which only shows which open transaction has the message
# (`monitoring/open_transactions.py`).
INSERT_PREPARED = f"""
WITH message AS ({INSERT_ROW}),
batch AS (
    INSERT INTO outbox_batch (topic_id, message_ids, half_ids, state, decided_at, ends_until)
    VALUES (%s, ARRAY[%s]::uuid[], ARRAY[%s], {State.PREPARED}, clock_timestamp(), clock_timestamp() + %s::interval)
    RETURNING id)
SELECT batch.id, source.id
FROM batch, outbox_source source, pg_advisory_xact_lock_shared({Lock.HALF_FIRST}, hashtext(%s::text))
"""

# Runs in the transaction that has written the batch, so that a committed batch says where its half message is stored.
STORE_PLACE = f"UPDATE outbox_batch SET half_places = ARRAY[%s] WHERE id = %s AND state = {State.PREPARED} AND attempt = 1"

MARK_SENT = f"""
UPDATE outbox_batch SET state = {State.SENT}, sent_at = clock_timestamp(), open = NULL
WHERE id = %s AND state = {State.PREPARED} AND attempt = 1
"""

CLOCK_AHEAD = timedelta(hours=1)
"""How far a publisher's clock may be ahead of the database's. If a message's id is further ahead, no tombstone is written."""

# Read a message row and its batch of one message. This is a separate statement, because only its later snapshot sees the row for
# which INSERT_TOMBSTONE has waited. The condition with `outbox_newest` uses an index; the newest message of a batch of one is its
# only message. The batch's columns are NULL if there is no such batch. `is_being_ended`: the process that decided the batch, or
# the sweep that took it over, may still end its half message.
READ_STEP = """
SELECT message.topic_id = 0 AS is_tombstone, batch.id AS batch, batch.state, batch.attempt, batch.half_ids[1] AS half_id,
    coalesce(batch.ends_until > clock_timestamp(), false) AS is_being_ended
FROM outbox_message message
LEFT JOIN outbox_batch batch ON outbox_newest(batch.message_ids) = %(id)s AND cardinality(batch.message_ids) = 1
WHERE message.id = %(id)s
"""


class Tombstone(enum.Enum):
    """
    The result of writing a tombstone.

    ROW_IS_THERE: the transaction has written the row and has committed, or there is a tombstone already.
    UNWRITTEN: the time in the message's id is outside of the retention (or in the future), so that a missing row proves nothing.
    """

    WRITTEN = enum.auto()
    ROW_IS_THERE = enum.auto()
    UNWRITTEN = enum.auto()


def insert_prepared(
    draft: Draft, topic_id: int, using: str, *, half_id: str, about: str | None, window: timedelta | None = None
) -> tuple[int, str]:
    """
    Write message row and batch in the open transaction; return the batch's id, and the stable id of the database.

    Args:
        window: how long this process may end the half message; None for no limit.

    Raises:
        HalfNotStored: the message has a tombstone. The transaction is aborted.
    """
    row = (draft.id, topic_id, draft.key, draft.headers, about, draft.body)
    values: list[Any] = [*row, topic_id, draft.id, half_id, window, str(draft.id)]
    try:
        with connections[using].cursor() as cursor:
            cursor.execute(INSERT_PREPARED, values)
            if written := cursor.fetchone():
                batch_id, source = written
                return batch_id, source
            raise no_identity(cursor.connection)
    except IntegrityError as error:
        if not isinstance(error.__cause__, psycopg.errors.UniqueViolation):
            raise
        raise HalfNotStored(
            f"Message {draft.id} ({draft.subject}) was rolled back by a check-back before its transaction began to write.",
            hint="Nothing was done; try again with a new message.",
        ) from error


def store_half_first_place(cursor: CursorWrapper, batch_id: int, place: str) -> None:
    """Store where the broker keeps the half message (`HalfRef.place`), in the transaction that has written the batch."""
    cursor.execute(STORE_PLACE, [place, batch_id])


def mark_half_first_sent(cursor: CursorWrapper, batch_id: int) -> None:
    """Mark the batch SENT after its half message was committed. Does nothing if a sweep has marked or released it first."""
    cursor.execute(MARK_SENT, [batch_id])


def write_tombstone(connection: Connection, message_id: UUID, *, retention: timedelta) -> Tombstone:
    """
    Write a tombstone with the id of a message, so that a transaction that inserts its row can never commit.

    Args:
        retention: how long messages are kept; they stay until the end of their UTC day.

    Raises:
        psycopg.errors.LockNotAvailable: a transaction that has not ended has written the row.
        psycopg.errors.CheckViolation: there is no partition for the row.
    """
    values = {"id": message_id, "retention": retention, "ahead": CLOCK_AHEAD}
    is_kept, is_written = connection.execute(INSERT_TOMBSTONE, values).fetchone() or (False, False)
    if not is_kept:
        return Tombstone.UNWRITTEN
    return Tombstone.WRITTEN if is_written else Tombstone.ROW_IS_THERE


def read_half_first(connection: Connection, message_id: UUID) -> Any:
    """Return the state of a message that was sent half first; None if its row is gone."""
    return connection.cursor(row_factory=namedtuple_row).execute(READ_STEP, {"id": message_id}).fetchone()

"""The fence: message row and decided batch, inserted before the half message is sent; and the mark after its commit."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
from django.db import IntegrityError, connections

from outbox.batches.half_first import PreparedRow, insert_prepared, mark_half_first_sent, note_half_first_place
from outbox.errors import HalfNotStored

if TYPE_CHECKING:
    from outbox.publishing.draft import Draft


def write_fence(
    draft: Draft, topic: int, using: str, *, half_id: str, about: str | None, window: timedelta | None = None
) -> PreparedRow:
    """
    Insert message row and batch in the open transaction.

    Args:
        window: how long this process may end the half message. None: at any time.

    Raises:
        HalfNotStored: the message has a tombstone. The transaction is aborted.
    """
    try:
        with connections[using].cursor() as cursor:
            return insert_prepared(
                cursor,
                message_id=draft.id,
                topic_id=topic,
                key=draft.key,
                headers=draft.headers,
                about=about,
                body=draft.body,
                half_id=half_id,
                window=window,
            )
    except IntegrityError as error:
        if not isinstance(error.__cause__, psycopg.errors.UniqueViolation):
            raise
        raise HalfNotStored(
            f"Message {draft.id} ({draft.subject}) was rolled back by a check-back before its transaction began to write.",
            hint="Nothing was done; try again with a new message.",
        ) from error


def note_place(row: PreparedRow, place: str, using: str) -> None:
    """Store the half message's place at the broker, in the open transaction, for the process that may have to end it instead."""
    with connections[using].cursor() as cursor:
        note_half_first_place(cursor, row.batch, place)


def mark_sent(row: PreparedRow, using: str) -> None:
    """Mark the batch SENT after its half message was committed."""
    with connections[using].cursor() as cursor:
        mark_half_first_sent(cursor, row.batch)

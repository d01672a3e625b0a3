"""The fence: message row and decided batch, written before the broker hears of the message; and the mark at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import IntegrityError, connections

from outbox.errors import HalfNotStored

if TYPE_CHECKING:
    from outbox.publishing.draft import Draft

# The message row, and a batch of one without lane and number, decided already: it counts from the database commit on. A
# plain INSERT, whose conflict nobody may catch: where the check-back has put a tombstone, this transaction must not commit.
INSERT = """
WITH m AS (INSERT INTO outbox_message (id, topic_id, key, headers, about, body) VALUES (%s, %s, %s, %s, %s, %s)),
b AS (
    INSERT INTO outbox_batch (topic_id, message_ids, half_ids, state, decided_at)
    VALUES (%s, ARRAY[%s]::uuid[], ARRAY[%s], 2, clock_timestamp()) RETURNING id)
SELECT b.id, source.id FROM b, outbox_source source
"""

# No row: the sweep was faster, and wrote it or sends the message again.
MARK_SENT = """
UPDATE outbox_batch SET state = 3, sent_at = clock_timestamp(), open = NULL
WHERE id = %s AND state = 2 AND attempt = 1
"""


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence that stands. `source`: the stable id of its database."""

    batch: int
    source: str


def insert_prepared(draft: Draft, topic: int, using: str, *, half_id: str, about: str | None) -> Fence:
    """
    Write message row and batch into the open transaction.

    Raises:
        HalfNotStored: a tombstone is there; the transaction is broken.
    """
    values: list[Any] = [draft.id, topic, draft.key, draft.headers, about, draft.body, topic, draft.id, half_id]
    try:
        with connections[using].cursor() as cursor:
            cursor.execute(INSERT, values)
            batch, source = cursor.fetchone()
    except IntegrityError as error:
        if not isinstance(error.__cause__, psycopg.errors.UniqueViolation):
            raise
        raise HalfNotStored(
            f"Message {draft.id} ({draft.subject}) was rolled back by a check-back before its transaction began to write. "
            "Nothing was done; try again with a new message."
        ) from error
    return Fence(batch, source)


def mark_sent(fence: Fence, using: str) -> None:
    """Mark the batch SENT, its half message being committed."""
    with connections[using].cursor() as cursor:
        cursor.execute(MARK_SENT, [fence.batch])

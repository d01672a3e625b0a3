"""Prune: delete sent and discarded batches that are past their retention."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outbox.database import Connection
from outbox.models import State

SLICE = 1000

# Delete old batches from a slice of batches by id, which is the order in which they were claimed. Only sent and discarded batches
# are deleted, and only if none of their messages is in a daily partition that was kept, or in the first one within the retention
# (a publisher's clock may have been ahead). Return the last id of the slice, whether all of its batches are old, and how many
# were deleted.
PRUNE = f"""
WITH slice AS (
    SELECT id, state, message_ids, coalesce(sent_at, claimed_at) < %(before)s AS is_old
    FROM outbox_batch WHERE id > %(after)s ORDER BY id LIMIT %(limit)s
), deleted AS (
    DELETE FROM outbox_batch WHERE state IN ({State.SENT}, {State.DISCARDED}) AND id = ANY(ARRAY(
        SELECT id FROM slice WHERE is_old AND NOT EXISTS (
            SELECT FROM unnest(message_ids) member(id), unnest(%(firsts)s::uuid[], %(ends)s::uuid[]) kept(first, "end")
            WHERE member.id >= kept.first AND member.id < kept."end"))) RETURNING 1
)
SELECT max(id), bool_and(is_old), (SELECT count(*) FROM deleted) FROM slice
"""


def prune(connection: Connection, *, before: datetime, kept: Sequence[tuple[UUID, UUID]]) -> int:
    """
    Delete old sent and discarded batches, slice by slice, until a slice has a batch that is not old; return how many.

    Args:
        connection: in autocommit.
        before: the end of the retention; batches that were sent or claimed earlier are deleted.
        kept: ranges of message ids (the second bound excluded); batches with a message in one of them are kept.
    """
    bounds = {"firsts": [first for first, _ in kept], "ends": [end for _, end in kept]}
    after = 0
    deleted: int = 0
    while True:
        rows = connection.execute(PRUNE, {"after": after, "before": before, "limit": SLICE, **bounds}).fetchall()
        [(last_id, is_all_old, count)] = rows
        deleted += count
        if not is_all_old:  # None if there were no batches
            return deleted
        after = last_id

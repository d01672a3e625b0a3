"""Prune: batches that are sent or skipped, and past their retention, go."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outbox.database import Connection
from outbox.models import State

SLICE = 1000

# A slice of batches by id, which grows with the time of the claim. Old sent and skipped batches are deleted, unless a
# message of theirs is in a day that was kept, or in the first young one: a publisher's clock may have been ahead. The
# walk ends at the first slice that holds a young batch.
PRUNE = f"""
WITH slice AS (
    SELECT id, state, message_ids, coalesce(sent_at, claimed_at) < %(before)s AS is_old
    FROM outbox_batch WHERE id > %(after)s ORDER BY id LIMIT %(limit)s
), gone AS (
    DELETE FROM outbox_batch WHERE state IN ({State.SENT}, {State.SKIPPED}) AND id = ANY(ARRAY(
        SELECT id FROM slice WHERE is_old AND NOT EXISTS (
            SELECT FROM unnest(message_ids) m(id), unnest(%(firsts)s::uuid[], %(ends)s::uuid[]) kept(first, "end")
            WHERE m.id >= kept.first AND m.id < kept."end"))) RETURNING 1
)
SELECT max(id), bool_and(is_old), (SELECT count(*) FROM gone) FROM slice
"""


def prune(connection: Connection, *, before: datetime, kept: Sequence[tuple[UUID, UUID]]) -> int:
    """
    Delete sent and skipped batches, slice by slice; return how many.

    Args:
        connection: in autocommit.
        before: those that ended earlier.
        kept: bounds of ids (the second one excluded); a batch with a message in one of them stays.
    """
    bounds = {"firsts": [first for first, _ in kept], "ends": [end for _, end in kept]}
    after = 0
    deleted: int = 0
    while True:
        row = connection.execute(PRUNE, {"after": after, "before": before, "limit": SLICE, **bounds}).fetchone()
        assert row is not None
        last_id, is_all_old, count = row
        deleted += count
        if not is_all_old:  # NULL: there were none
            return deleted
        after = last_id

"""Decide: a claimed batch whose half messages are stored becomes PREPARED. This row is the decision to commit them."""

from __future__ import annotations

from collections.abc import Sequence

from outbox.batches.batch import Batch
from outbox.database import Connection
from outbox.models import State

DECIDE = f"""
UPDATE outbox_batch SET state = {State.PREPARED}, half_ids = %s::text[], decided_at = clock_timestamp(), lease_until = NULL
WHERE id = %s AND state = {State.CLAIMED} AND attempt = %s RETURNING id
"""


def decide(connection: Connection, batch: Batch, half_ids: Sequence[str | None]) -> bool:
    """
    Decide to commit all half messages of a batch; where some are not stored, `split` decides the others.

    Args:
        half_ids: one per position, None where the position was split off before.

    Returns:
        False when the fence was lost.
    """
    return connection.execute(DECIDE, [half_ids, batch.id, batch.attempt]).fetchone() is not None

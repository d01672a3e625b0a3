"""
Decide: a claimed batch whose half messages are stored becomes PREPARED. This update is the decision to commit them.

It also stores until when the decider may end them (`ends_until`), and where the broker stores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from outbox.batches.batch import Batch, places_as_stored
from outbox.database import Connection
from outbox.models import State

DECIDE = f"""
UPDATE outbox_batch SET state = {State.PREPARED}, half_ids = %(half_ids)b::text[], half_places = %(half_places)b::text[],
    decided_at = clock_timestamp(), ends_until = clock_timestamp() + %(window)s::interval, lease_until = NULL
WHERE id = %(id)s AND state = {State.CLAIMED} AND attempt = %(attempt)s RETURNING id
"""


def decide(
    connection: Connection,
    batch: Batch,
    half_ids: Sequence[str | None],
    *,
    half_places: Mapping[int, str],
    window: timedelta | None,
) -> bool:
    """
    Decide to commit all half messages of a batch; where some are not stored, `split` decides the others.

    Args:
        half_ids: one per position, None where the position was split off before.
        half_places: position -> where the broker stores the half message.
        window: how long the caller may end them. None: at any time.

    Returns:
        False when the fence was lost.
    """
    arguments = {
        "id": batch.id,
        "attempt": batch.attempt,
        "half_ids": half_ids,
        "half_places": places_as_stored(half_places, len(batch.message_ids)),
        "window": window,
    }
    return connection.execute(DECIDE, arguments).fetchone() is not None

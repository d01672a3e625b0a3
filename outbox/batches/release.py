"""
Return and release: a claimed batch of which no message was accepted is released, or DEAD where all of it was rejected; the
batches that a lane's dead holder had claimed are released.
"""

from __future__ import annotations

from datetime import timedelta

from outbox.batches.batch import Batch
from outbox.batches.failures import DeadNotice, copy_dead
from outbox.database import Connection
from outbox.models import State

RETURN_BATCH = f"""
UPDATE outbox_batch SET state = CASE WHEN %(dead)s THEN {State.DEAD} ELSE {State.RELEASED} END, tries = tries + %(tried)s::int,
    due_at = clock_timestamp() + %(wait)s, lease_until = NULL, last_error = %(error)s
WHERE id = %(id)s AND state = {State.CLAIMED} AND attempt = %(attempt)s RETURNING id
"""

# Batches that a lane's last holder left behind. The caller holds the lock of the lane, so that relay is gone.
RELEASE_LEFT = f"""
UPDATE outbox_batch SET state = {State.RELEASED}, due_at = clock_timestamp(), lease_until = NULL
WHERE state = {State.CLAIMED} AND owner = %s
"""


def return_batch(
    connection: Connection, batch: Batch, *, wait: timedelta, error: str, is_tried: bool, is_dead: bool
) -> list[DeadNotice] | None:
    """
    Release a claimed batch, or mark it DEAD.

    Args:
        wait: how long until it may be claimed again.
        is_tried: whether the try counts.
        is_dead: whether the broker rejected all its messages.

    Returns:
        The messages that have become dead; None when the fence was lost.
    """
    arguments = {"id": batch.id, "attempt": batch.attempt, "dead": is_dead, "tried": is_tried, "wait": wait, "error": error}
    if connection.execute(RETURN_BATCH, arguments).fetchone() is None:
        return None
    return copy_dead(connection, [batch.id]) if is_dead else []


def release_left(connection: Connection, lane: int) -> int:
    """Release the batches that the last holder of a lane has claimed and not decided; return how many."""
    return connection.execute(RELEASE_LEFT, [lane]).rowcount

"""
The give-up (PREPARED to DEAD) of a batch of one message, when nothing can prove any more whether it was published.

The broker has neither the half message nor the message, but it no longer keeps messages that old, so this proves nothing.
Sending the message again might publish it twice; marking it as sent might lose it. An operator decides: retry sends it
again, skip accepts it as published. `split` takes such messages out of a larger batch first.
"""

from __future__ import annotations

from outbox.batches.batch import PreparedBatch
from outbox.batches.failures import DeadNotice, copy_dead
from outbox.database import Connection
from outbox.models import State

GIVE_UP = f"""
UPDATE outbox_batch SET state = {State.DEAD}, last_error = %(error)s, half_ids = NULL, half_places = NULL, open = NULL,
    ends_until = NULL
WHERE id = %(id)s AND state = {State.PREPARED} AND attempt = %(attempt)s AND cardinality(message_ids) = 1 RETURNING id
"""


def give_up_unproven(connection: Connection, batch: PreparedBatch, *, error: str) -> list[DeadNotice] | None:
    """
    Mark a prepared batch of one DEAD.

    Returns:
        The message that has become dead; None when the fence was lost.
    """
    arguments = {"id": batch.id, "attempt": batch.attempt, "error": error}
    if connection.execute(GIVE_UP, arguments).fetchone() is None:
        return None
    return copy_dead(connection, [batch.id])

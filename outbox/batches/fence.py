"""
The fence: each step names the batch's state and attempt, so that a relay with an older attempt changes nothing.

A step is an UPDATE that moves a batch to its next state. If a step on one batch matches no row, it raises `FenceLost`: another
process has taken the batch over, or the step was written before and its answer was lost. `read_step` reads the row again to tell
the two apart. A step on several batches returns the ids of those that it has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outbox.database import Connection
from outbox.errors import FenceLost
from outbox.models import State

READ_STEP = f"""
SELECT attempt = %s AND state IN ({State.PREPARED}, {State.SENT}), half_ids, split FROM outbox_batch WHERE id = %s
"""

# Take a batch from a relay whose lease is over. If the statement returns a row, that relay can no longer decide the batch; if
# not, the relay has just decided the batch, or another process has claimed it.
FENCE = f"""
UPDATE outbox_batch SET state = {State.RELEASED}, due_at = clock_timestamp(), lease_until = NULL
WHERE id = %s AND state = {State.CLAIMED} AND attempt = %s AND lease_until < clock_timestamp() RETURNING id
"""


def take_step(connection: Connection, statement: str, parameters: Sequence[Any] | Mapping[str, Any]) -> tuple[Any, ...]:
    """
    Execute a step on one batch; return its row.

    Raises:
        FenceLost: the step matched no row.
    """
    row = connection.execute(statement, parameters).fetchone()
    if row is None:
        raise FenceLost("Another process has taken the batch over, or this step was written before. Read the batch again.")
    return row


def read_step(
    connection: Connection, batch_id: int, attempt: int
) -> tuple[bool | None, Sequence[str | None] | None, Sequence[int]]:
    """
    Return whether this attempt has decided or sent a batch, the ids of its half messages, and the positions split off.

    If the row is gone, the first two values are None.
    """
    return connection.execute(READ_STEP, [attempt, batch_id]).fetchone() or (None, None, ())


def fence(connection: Connection, batch_id: int, attempt: int) -> None:
    """
    Release a claimed batch whose lease is over, so that the relay of this attempt can no longer decide it.

    Raises:
        FenceLost: the batch is no longer claimed in this attempt, or the lease is not over.
    """
    take_step(connection, FENCE, [batch_id, attempt])

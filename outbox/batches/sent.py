"""Sent: mark batches whose broker has confirmed all messages; store which commits of the others stay open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outbox.batches.batch import Batch, PreparedBatch
from outbox.database import Connection
from outbox.models import State

# Returns ids, because a row count would not say which batches were marked.
MARK_SENT = f"""
UPDATE outbox_batch b SET state = {State.SENT}, sent_at = clock_timestamp(), lease_until = NULL, open = NULL
FROM unnest(%s::bigint[], %s::bigint[]) s(id, attempt)
WHERE b.id = s.id AND b.state = %s AND b.attempt = s.attempt RETURNING b.id
"""

LEAVE_OPEN = f"""
UPDATE outbox_batch SET open = %s::smallint[] WHERE id = %s AND state = {State.PREPARED} AND attempt = %s RETURNING id
"""


def mark_sent(connection: Connection, batches: Iterable[Batch | PreparedBatch], *, state: State) -> set[int]:
    """
    Mark batches SENT.

    Args:
        state: their state before: CLAIMED when sent in one phase, PREPARED when sent in two.

    Returns:
        The ids of the batches that this call has marked; the fence of the others was lost.
    """
    chosen = list(batches)
    arguments = [[batch.id for batch in chosen], [batch.attempt for batch in chosen], state]
    return {row[0] for row in connection.execute(MARK_SENT, arguments).fetchall()}


def leave_open(connection: Connection, batch: PreparedBatch, positions: Sequence[int]) -> bool:
    """
    Store which commits of a prepared batch have no answer yet.

    Returns:
        False when the fence was lost.
    """
    return connection.execute(LEAVE_OPEN, [list(positions), batch.id, batch.attempt]).fetchone() is not None

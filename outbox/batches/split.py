"""
Split: messages whose send ended differently from the rest of their batch leave it for batches of their own.

They leave in runs of adjacent positions, with the same lane and numbers. Each position is either decided or split, never both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from outbox.batches.batch import Batch, PreparedBatch, SplitReason, Unaccepted, places_as_stored
from outbox.batches.fence import take_step
from outbox.batches.steps import DeadNotice, copy_dead
from outbox.database import Connection
from outbox.models import State

# Positions leave in runs lo..hi. `NOT split &&`: a repeated call, or a second sweep, splits nothing off twice.
SPLIT = f"""
WITH batch AS (
    UPDATE outbox_batch SET state = %(next)s, sent_at = CASE WHEN %(next)s = {State.SENT} THEN clock_timestamp() END,
        decided_at = coalesce(decided_at, CASE WHEN %(next)s = {State.PREPARED} THEN clock_timestamp() END),
        ends_until = CASE WHEN state = {State.PREPARED} THEN ends_until
            WHEN %(next)s = {State.PREPARED} THEN clock_timestamp() + %(window)s::interval END,
        split = split || %(positions)s::smallint[], half_ids = coalesce(%(half_ids)s::text[], half_ids),
        half_places = coalesce(%(half_places)s::text[], half_places), open = %(open)s::smallint[], lease_until = NULL
    WHERE id = %(id)s AND state = %(state)s AND attempt = %(attempt)s
    AND NOT split && %(positions)s::smallint[] AND cardinality(message_ids) > 1
    RETURNING *),
split_off AS (
    INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, order_keys, origin_id,
        state, attempt, failures, due_at, last_error)
    SELECT topic_id, lane, first_seq + run.lo - 1, message_ids[run.lo:run.hi], order_keys[run.lo:run.hi], coalesce(origin_id, id),
        CASE WHEN run.dead THEN {State.DEAD} ELSE {State.RELEASED} END, attempt, failures + run.counted::int,
        clock_timestamp() + run.wait, run.error
    FROM batch, unnest(%(lo)s::smallint[], %(hi)s::smallint[], %(dead)s::boolean[], %(counted)s::boolean[], %(wait)s::interval[],
        %(errors)s::text[]) run(lo, hi, dead, counted, wait, error)
    ORDER BY run.lo
    RETURNING id, state)
SELECT array(SELECT id FROM split_off WHERE state = {State.DEAD}) FROM batch
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent positions (lo to hi) that leave for the same reason."""

    lo: int
    hi: int
    reason: SplitReason
    text: str

    @property
    def is_dead(self) -> bool:
        """
        Whether the messages become DEAD.

        Only a message that the broker refuses does, and one whose commit can no longer be proved; an outage or a time-out never
        makes a message DEAD.
        """
        return self.reason in (SplitReason.REFUSED, SplitReason.UNPROVEN)

    @property
    def is_counted(self) -> bool:
        """Whether the failure is counted. An outage, or a configuration that an operator has to correct, is not counted."""
        return self.reason.is_failure and self.reason not in (SplitReason.UNAVAILABLE, SplitReason.MISCONFIGURED)


def runs(unaccepted: Mapping[int, Unaccepted]) -> list[Run]:
    """Join adjacent positions that leave for the same reason."""
    found: list[Run] = []
    for position, one in sorted(unaccepted.items()):
        last = found[-1] if found else None
        if last and last.hi == position - 1 and (last.reason, last.text) == (one.reason, one.text):
            found[-1] = Run(last.lo, position, last.reason, last.text)
        else:
            found.append(Run(position, position, one.reason, one.text))
    return found


def split(
    connection: Connection,
    batch: Batch | PreparedBatch,
    leaving: Sequence[Run],
    *,
    waits: Sequence[timedelta],
    state: State,
    next_state: State,
    half_ids: Sequence[str | None] | None = None,
    half_places: Mapping[int, str] | None = None,
    window: timedelta | None = None,
    open_positions: Sequence[int] | None = None,
) -> list[DeadNotice]:
    """
    Split positions off a batch in a state; the rest of the batch goes on to `next_state`.

    Args:
        leaving: runs that each become a batch, RELEASED or DEAD.
        waits: for each run, how long until it may be claimed again.
        half_ids: one per position, None where it is split off; None leaves the stored ones.
        half_places: position -> where the broker stores the half message; None leaves the stored ones.
        window: how long the caller may end the half messages, where this is the decision. None: at any time.
        open_positions: decided positions whose commit has no answer; None means all.

    Returns:
        The messages that have become dead.

    Raises:
        FenceLost: nothing is done; or a position had been split off before.
    """
    arguments = {
        "id": batch.id,
        "attempt": batch.attempt,
        "state": state,
        "next": next_state,
        "positions": [position for run in leaving for position in range(run.lo, run.hi + 1)],
        "half_ids": None if half_ids is None else list(half_ids),
        "half_places": None if half_places is None else places_as_stored(half_places, len(batch.message_ids)),
        "window": window,
        "open": None if open_positions is None else list(open_positions),
        "lo": [run.lo for run in leaving],
        "hi": [run.hi for run in leaving],
        "dead": [run.is_dead for run in leaving],
        "counted": [run.is_counted for run in leaving],
        "wait": list(waits),
        "errors": [run.text for run in leaving],
    }
    (dead,) = take_step(connection, SPLIT, arguments)
    return copy_dead(connection, dead)

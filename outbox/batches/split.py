"""
Split: messages whose send had another result than the rest of their batch are moved into new batches.

A run is a range of adjacent positions with the same outcome. Each run that is split off becomes one batch, in which the messages
keep their lane and numbers. A position is either decided or split off, never both. A batch may be split before it is sent, if it
is too large for one transaction (`split_at_claim`); after a one-phase send (`split_at_send`); when its half messages are decided
(`split_at_decision`); and when the broker turns out to have lost some of its half messages (`split_at_commit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from outbox.batches.batch import ClaimedBatch, PreparedBatch, SplitReason, Unaccepted, places_as_stored
from outbox.batches.fence import take_step
from outbox.batches.steps import DeadNotice, copy_dead
from outbox.database import Connection
from outbox.models import State


def _statement(state: State, changes: str = "") -> str:
    """
    Return the statement that splits positions off a batch in `state`. `changes`: SQL of further assignments, each with a comma.

    Positions are split off in runs from lo to hi. `NOT split &&` keeps a repeated call, or a second sweep, from splitting a
    position off twice.
    """
    return f"""
WITH batch AS (
    UPDATE outbox_batch SET {changes} split = split || %(positions)s::smallint[]
    WHERE id = %(id)s AND state = {state} AND attempt = %(attempt)s
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


SPLIT_AT_CLAIM = _statement(State.CLAIMED)

SPLIT_AT_SEND = _statement(
    State.CLAIMED, f"state = {State.SENT}, sent_at = clock_timestamp(), open = NULL, ends_until = NULL, lease_until = NULL,"
)

SPLIT_AT_DECISION = _statement(
    State.CLAIMED,
    f"""state = {State.PREPARED}, half_ids = %(half_ids)s::text[], half_places = %(half_places)s::text[], open = NULL,
        lease_until = NULL, decided_at = clock_timestamp(), ends_until = clock_timestamp() + %(window)s::interval,""",
)

SPLIT_AT_COMMIT = _statement(
    State.PREPARED,
    f"""state = CASE WHEN %(open)s::smallint[] IS NULL THEN {State.SENT} ELSE {State.PREPARED} END,
        sent_at = CASE WHEN %(open)s::smallint[] IS NULL THEN clock_timestamp() END, open = %(open)s::smallint[],
        lease_until = NULL, half_ids = %(half_ids)s::text[], half_places = coalesce(%(half_places)s::text[], half_places),""",
)


class Run(msgspec.Struct, frozen=True):
    """Adjacent positions, from `lo` up to and including `hi`, that were not accepted for the same reason."""

    lo: int
    hi: int
    reason: SplitReason
    text: str

    @property
    def is_dead(self) -> bool:
        """
        Whether the messages become DEAD.

        Only a message that the broker refuses becomes DEAD, or one of which nothing proves whether it was published. An outage or
        a timeout never makes a message DEAD.
        """
        return self.reason in (SplitReason.REFUSED, SplitReason.UNPROVEN)

    @property
    def is_counted(self) -> bool:
        """Whether `failures` is incremented. Outages, and configuration that an operator has to correct, do not count."""
        return self.reason.is_failure and self.reason not in (SplitReason.UNAVAILABLE, SplitReason.MISCONFIGURED)


def runs(unaccepted: Mapping[int, Unaccepted]) -> list[Run]:
    """Return the runs of adjacent positions with the same reason and text."""
    joined: list[Run] = []
    for position, outcome in sorted(unaccepted.items()):
        last = joined[-1] if joined else None
        if last and last.hi == position - 1 and (last.reason, last.text) == (outcome.reason, outcome.text):
            joined[-1] = Run(last.lo, position, last.reason, last.text)
        else:
            joined.append(Run(position, position, outcome.reason, outcome.text))
    return joined


def split_at_claim(
    connection: Connection, batch: ClaimedBatch, leaving: Sequence[Run], *, waits: Sequence[timedelta]
) -> list[DeadNotice]:
    """Split positions off a claimed batch, which stays claimed and is sent without them. The rest is as in `split_at_send`."""
    return _split(connection, SPLIT_AT_CLAIM, batch, leaving, waits, {})


def split_at_send(
    connection: Connection, batch: ClaimedBatch, leaving: Sequence[Run], *, waits: Sequence[timedelta]
) -> list[DeadNotice]:
    """
    Split positions off a claimed batch that was sent in one phase; the rest of it is SENT.

    Args:
        leaving: the runs to split off; each becomes a batch, RELEASED or DEAD.
        waits: for each run, the time after which it may be claimed again.

    Returns:
        The messages that have become dead.

    Raises:
        FenceLost: nothing was changed, because the fence was lost or a position had been split off before.
    """
    return _split(connection, SPLIT_AT_SEND, batch, leaving, waits, {})


def split_at_decision(
    connection: Connection,
    batch: ClaimedBatch,
    leaving: Sequence[Run],
    *,
    waits: Sequence[timedelta],
    half_ids: Sequence[str | None],
    half_places: Mapping[int, str],
    window: timedelta | None,
) -> list[DeadNotice]:
    """
    Split positions off a claimed batch, and decide to commit the half messages of the others.

    Everything else is as in `split_at_send`.

    Args:
        half_ids: one per position; None for positions that are split off.
        half_places: position -> where the broker stores the half message.
        window: how long the caller may end the half messages; None for no limit.
    """
    places = places_as_stored(half_places, len(batch.message_ids))
    extra_arguments = {"half_ids": list(half_ids), "half_places": places, "window": window}
    return _split(connection, SPLIT_AT_DECISION, batch, leaving, waits, extra_arguments)


def split_at_commit(
    connection: Connection,
    batch: PreparedBatch,
    leaving: Sequence[Run],
    *,
    waits: Sequence[timedelta],
    open_positions: Sequence[int],
) -> list[DeadNotice]:
    """
    Split positions whose half messages are gone off a prepared batch. Everything else is as in `split_at_send`.

    Args:
        open_positions: positions whose commit has no answer. If there are any, the batch stays PREPARED; otherwise it becomes
            SENT.
    """
    gone = set(_positions_of(leaving))
    places = {position: place for position, place in batch.half_places.items() if position not in gone}
    extra_arguments = {
        "half_ids": [None if position in gone else half for position, half in enumerate(batch.half_ids, 1)],
        "half_places": places_as_stored(places, len(batch.message_ids)),
        "open": list(open_positions) or None,
    }
    return _split(connection, SPLIT_AT_COMMIT, batch, leaving, waits, extra_arguments)


def _split(
    connection: Connection,
    statement: str,
    batch: ClaimedBatch | PreparedBatch,
    leaving: Sequence[Run],
    waits: Sequence[timedelta],
    extra_arguments: Mapping[str, Any],
) -> list[DeadNotice]:
    """Execute one of the statements above with the arguments that all of them have, and extra ones; copy the dead messages."""
    arguments = {
        "id": batch.id,
        "attempt": batch.attempt,
        "positions": _positions_of(leaving),
        "lo": [run.lo for run in leaving],
        "hi": [run.hi for run in leaving],
        "dead": [run.is_dead for run in leaving],
        "counted": [run.is_counted for run in leaving],
        "wait": list(waits),
        "errors": [run.text for run in leaving],
    }
    (dead,) = take_step(connection, statement, arguments | dict(extra_arguments))
    return copy_dead(connection, dead)


def _positions_of(leaving: Sequence[Run]) -> list[int]:
    return [position for run in leaving for position in range(run.lo, run.hi + 1)]

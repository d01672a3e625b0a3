"""
Messages that fare differently from their batch part from it.

Either the whole batch goes back as it is (in place), or the positions are split off: as runs of neighbours they become
batches of their own, with the same lane and numbers. A position is decided or split, never both and never neither.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from outbox import signals
from outbox.batches.batch import Batch, PreparedBatch, SplitReason, Unaccepted
from outbox.batches.failures import announce, copy_dead, note_failure
from outbox.database import Connection
from outbox.models import State
from outbox.relay.backoff import Backoff

logger = logging.getLogger(__name__)

ALARM_TRIES = 10  # a batch that failed so often, and each further such number of times, is a person's concern

# Positions leave as runs lo..hi. `NOT split &&`: a repeat, or a second sweeper, splits nothing off twice.
SPLIT = """
WITH b AS (
    UPDATE outbox_batch SET state = %(next)s, sent_at = CASE WHEN %(next)s = 3 THEN clock_timestamp() END,
        decided_at = coalesce(decided_at, CASE WHEN %(next)s = 2 THEN clock_timestamp() END),
        split = split || %(positions)s::smallint[], half_ids = coalesce(%(halves)s::text[], half_ids),
        open = %(open)s::smallint[], lease_until = NULL
    WHERE id = %(id)s AND state = %(state)s AND attempt = %(attempt)s
    AND NOT split && %(positions)s::smallint[] AND cardinality(message_ids) > 1
    RETURNING *),
s AS (
    INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, order_keys, state, attempt, tries, due_at, last_error)
    SELECT b.topic_id, b.lane, b.first_seq + r.lo - 1, b.message_ids[r.lo:r.hi], b.order_keys[r.lo:r.hi],
        CASE WHEN r.dead THEN 4 ELSE 0 END, b.attempt, b.tries + r.tried::int, clock_timestamp() + r.wait, r.error
    FROM b, unnest(%(lo)s::smallint[], %(hi)s::smallint[], %(dead)s::boolean[], %(tried)s::boolean[], %(wait)s::interval[],
        %(errors)s::text[]) r(lo, hi, dead, tried, wait, error)
    ORDER BY r.lo
    RETURNING id, state)
SELECT b.id, array(SELECT id FROM s WHERE state = 4) FROM b
"""

# Nothing was accepted, and all go the same way: the batch itself is released, or dead.
RETURN_BATCH = """
UPDATE outbox_batch SET state = CASE WHEN %(dead)s THEN 4 ELSE 0 END, tries = tries + %(tried)s::int,
    due_at = clock_timestamp() + %(wait)s, lease_until = NULL, last_error = %(error)s
WHERE id = %(id)s AND state = 1 AND attempt = %(attempt)s RETURNING id
"""

# Rule R for a batch of one: sent again under a new token, since the broker says that this very half message is no more.
RETURN_ONE = """
UPDATE outbox_batch SET state = 0, due_at = clock_timestamp() + %(wait)s, half_ids = NULL, open = NULL,
    tries = tries + 1, last_error = %(error)s
WHERE id = %(id)s AND state = 2 AND attempt = %(attempt)s AND cardinality(message_ids) = 1 RETURNING id
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours (lo to hi) that part for the same reason."""

    lo: int
    hi: int
    fate: SplitReason
    reason: str

    @property
    def is_dead(self) -> bool:
        """Only a refusal of this very message ends in DEAD; an outage or a time-out never does."""
        return self.fate is SplitReason.REFUSED

    @property
    def is_tried(self) -> bool:
        """Whether the try counts: neither an outage nor what a person has to set right says anything of the message."""
        return self.fate.is_failure and self.fate not in (SplitReason.UNAVAILABLE, SplitReason.MISCONFIGURED)


def runs(parted: Mapping[int, Unaccepted]) -> list[Run]:
    """Join neighbours that part for the same reason."""
    found: list[Run] = []
    for position, parting in sorted(parted.items()):
        last = found[-1] if found else None
        if last and last.hi == position - 1 and (last.fate, last.reason) == (parting.fate, parting.reason):
            found[-1] = Run(last.lo, position, last.fate, last.reason)
        else:
            found.append(Run(position, position, parting.fate, parting.reason))
    return found


@dataclass(frozen=True, slots=True)
class Splitter:
    """
    Writes down what parts, with the waits that the settings give.

    Args:
        retry: back-off of what the broker left unsure.
        misconfigured: wait of what only a person can set right.
    """

    connection: Connection
    retry: Backoff
    misconfigured: timedelta

    def return_batch(self, batch: Batch, parted: Mapping[int, Unaccepted]) -> bool:
        """
        Let a claimed batch go as a whole, nothing of it having been accepted.

        Returns:
            False when the fence was lost.
        """
        parting = runs(parted)
        wait, error = max((self._wait(run, batch.tries), run.reason) for run in parting)
        arguments = {
            "id": batch.id,
            "attempt": batch.attempt,
            "dead": all(run.is_dead for run in parting),
            "tried": any(run.is_tried for run in parting),
            "wait": wait,
            "error": error,
        }
        with self.connection.transaction():
            if self.connection.execute(RETURN_BATCH, arguments).fetchone() is None:
                return False
            self._note(batch, parting)
            buried = copy_dead(self.connection, [batch.id]) if arguments["dead"] else []
        announce(buried)
        _alarm(batch, parting)
        return True

    def split(
        self,
        batch: Batch | PreparedBatch,
        parted: Mapping[int, Unaccepted],
        *,
        state: State,
        next_state: State,
        half_ids: Sequence[str | None] | None = None,
        open_positions: Sequence[int] | None = None,
    ) -> bool:
        """
        Split positions off, the rest of the batch going on to `next_state`.

        Args:
            half_ids: one per position, None where it is split off; None leaves the stored ones.
            open_positions: decided positions whose commit has no answer; None means all.

        Returns:
            False when the fence was lost, or a position had been split off before.
        """
        parting = runs(parted)
        arguments = {
            "id": batch.id,
            "attempt": batch.attempt,
            "state": state,
            "next": next_state,
            "positions": sorted(parted),
            "halves": None if half_ids is None else list(half_ids),
            "open": None if open_positions is None else list(open_positions),
            "lo": [run.lo for run in parting],
            "hi": [run.hi for run in parting],
            "dead": [run.is_dead for run in parting],
            "tried": [run.is_tried for run in parting],
            "wait": [self._wait(run, batch.tries) for run in parting],
            "errors": [run.reason for run in parting],
        }
        with self.connection.transaction():
            row = self.connection.execute(SPLIT, arguments).fetchone()
            if row is None:
                return False
            self._note(batch, parting)
            buried = copy_dead(self.connection, row[1])
        announce(buried)
        _alarm(batch, parting)
        return True

    def return_one(self, batch: PreparedBatch, reason: str) -> bool:
        """Release a decided batch of one whose half message is no more. False when the fence was lost."""
        run = Run(1, 1, SplitReason.DISCARDED, reason)
        arguments = {"id": batch.id, "attempt": batch.attempt, "wait": self._wait(run, batch.tries), "error": reason}
        with self.connection.transaction():
            if self.connection.execute(RETURN_ONE, arguments).fetchone() is None:
                return False
            self._note(batch, [run])
        _alarm(batch, [run])
        return True

    def _wait(self, run: Run, tries: int) -> timedelta:
        if run.fate is SplitReason.MISCONFIGURED:
            return self.misconfigured
        # A half message that the broker dropped is sent again at once, but not round and round.
        is_repeated = run.fate is SplitReason.UNSURE or (run.fate is SplitReason.DISCARDED and tries > 0)
        return self.retry(tries) if is_repeated else timedelta(0)

    def _note(self, batch: Batch | PreparedBatch, parting: Sequence[Run]) -> None:
        for run in parting:
            if run.fate.is_failure:
                ids = batch.message_ids[run.lo - 1 : run.hi]
                note_failure(self.connection, batch.id, batch.attempt, ids, verdict=run.fate, reason=run.reason)


def _alarm(batch: Batch | PreparedBatch, parting: Sequence[Run]) -> None:
    """Tell a person what only a person can set right, and what has failed suspiciously often."""
    for run in parting:
        has_failed_often = run.is_tried and (batch.tries + 1) % ALARM_TRIES == 0
        if run.fate is SplitReason.MISCONFIGURED or has_failed_often:
            details = {"batch": batch.id, "topic": batch.topic, "tries": batch.tries + 1}
            logger.error("Batch %(batch)s of topic %(topic)s failed, try %(tries)s: %(reason)s", details | {"reason": run.reason})
            signals.alarm.send_robust(sender=Splitter, reason=run.reason, details=details)

"""
The decision, the commit of half messages, and the mark.

THE FENCE. Each write names the batch's state and attempt. When it matches nothing, the batch was taken over, or this
very write had happened before and its answer was lost. So the row is read again: decided under my attempt, my decision
stands and I go on; in any other state my half messages are rolled back; where there is no row, or the database
does not answer, nothing is sent, and the check-back settles it.

THE ORDER. Half messages are stored, then the decision is written, then they are committed. Nothing is committed that
is not decided, and nothing that is decided is ever undone but by rule R.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outbox import signals
from outbox.batches.batch import Batch, BatchSendResult, PreparedBatch, SplitReason, Unaccepted
from outbox.batches.split import Splitter, runs
from outbox.brokers.base import Broker, Ended, EndSemantics, HalfRef, SendResult, SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.database import Connection
from outbox.message import Resolution
from outbox.models import State

logger = logging.getLogger(__name__)

# The decision, when every half message is stored.
DECIDE = """
UPDATE outbox_batch SET state = 2, half_ids = %s::text[], decided_at = clock_timestamp(), lease_until = NULL
WHERE id = %s AND state = 1 AND attempt = %s RETURNING id
"""

# Many batches at once; a row count would not say which.
SENT = """
UPDATE outbox_batch b SET state = 3, sent_at = clock_timestamp(), lease_until = NULL, open = NULL
FROM unnest(%s::bigint[], %s::bigint[]) s(id, attempt)
WHERE b.id = s.id AND b.state = %s AND b.attempt = s.attempt RETURNING b.id
"""

# Commits that have no answer yet.
OPEN = "UPDATE outbox_batch SET open = %s::smallint[] WHERE id = %s AND state = 2 AND attempt = %s RETURNING id"

REREAD = "SELECT state, attempt, half_ids, split FROM outbox_batch WHERE id = %s"


@dataclass(frozen=True, slots=True)
class Decision:
    """What may be committed of a batch. `is_fresh`: this call wrote it, so no earlier one can have committed it."""

    batch: PreparedBatch
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class Ends:
    """
    How the commits of a batch ended; positions in neither are committed.

    Args:
        gone: position -> why its half message is no more.
        unanswered: positions whose commit stays open, with what the broker said.
    """

    batch: PreparedBatch
    gone: dict[int, str] = field(default_factory=dict)
    unanswered: dict[int, SendResult] = field(default_factory=dict)


@dataclass(slots=True)
class Committer:
    """Writes decisions and marks of one relay, and ends half messages at its broker."""

    connection: Connection
    broker: Broker
    parter: Splitter
    fences_lost: int = 0

    @property
    def may_repeat_ends(self) -> bool:
        """Whether a second end of a half message does no harm."""
        return HalfMessages.of(self.broker).end_semantics is EndSemantics.IDEMPOTENT

    def return_unaccepted(self, fared: BatchSendResult) -> bool:
        """
        Part what was not accepted, nothing being left to decide: the positions leave a batch that is then SENT.

        Where nothing was accepted, and not some of it dead and some not, the batch itself is released or dead instead.

        Returns:
            False when the fence was lost.
        """
        parting = runs(fared.parted)
        if not fared.accepted and (len(parting) == 1 or not any(run.is_dead for run in parting)):
            held = self.parter.return_batch(fared.batch, fared.parted)
        else:
            held = self.parter.split(fared.batch, fared.parted, state=State.CLAIMED, next_state=State.SENT)
        return held or self._is_mine(fared.batch, "part")

    def mark(self, batches: Iterable[Batch | PreparedBatch], *, state: State) -> set[int]:
        """Mark batches SENT that were in a state; give the ids of those that are, by this or an earlier call of ours."""
        wanted = {batch.id: batch for batch in batches}
        if not wanted:
            return set()
        attempts = [batch.attempt for batch in wanted.values()]
        rows = self.connection.execute(SENT, [list(wanted), attempts, state]).fetchall()
        marked = {row[0] for row in rows}
        return marked | {batch.id for batch in wanted.values() if batch.id not in marked and self._is_mine(batch, "mark")}

    def decide(self, fared: BatchSendResult) -> Decision | None:
        """
        Decide to commit the half messages that were accepted; the other positions part.

        Returns:
            None when nothing is to be committed: the fence was lost, and my half messages are rolled back.
        """
        batch = fared.batch
        half_ids = [fared.accepted.get(position) for position in range(1, len(batch.message_ids) + 1)]
        if fared.parted:
            is_written = self.parter.split(batch, fared.parted, state=State.CLAIMED, next_state=State.PREPARED, half_ids=half_ids)
        else:
            is_written = bool(self.connection.execute(DECIDE, [half_ids, batch.id, batch.attempt]).fetchone())
        positions = sorted(fared.accepted)
        if not is_written:
            positions = self._standing(fared)
        decided = PreparedBatch(
            batch.id, batch.attempt, batch.topic, batch.message_ids, half_ids, positions, batch.tries, fared.half_places
        )
        return Decision(decided, is_fresh=is_written) if positions else None

    def commit(self, batches: Sequence[PreparedBatch]) -> list[Ends]:
        """Commit the open half messages of batches."""
        ends = {batch.id: Ends(batch) for batch in batches}
        places = [(batch, position) for batch in batches for position in batch.positions]
        outcomes = self.end([batch.half(position) for batch, position in places], Resolution.COMMIT)
        for (batch, position), outcome in zip(places, outcomes, strict=True):
            if outcome.status is not SendStatus.ACCEPTED or outcome.ended in (None, Ended.NOT_FOUND):
                ends[batch.id].unanswered[position] = outcome
            elif outcome.ended is not Ended.COMMITTED:
                self._note_otherwise(ends[batch.id], position, outcome)
        return list(ends.values())

    def _note_otherwise(self, ends: Ends, position: int, outcome: SendResult) -> None:
        """Only a broker that remembers how a half message ended can say that it ended otherwise."""
        if self.may_repeat_ends:
            ends.gone[position] = f"The broker has {outcome.ended} its half message. {outcome.reason}".strip()
        else:
            ends.unanswered[position] = outcome

    def end(self, halves: Sequence[HalfRef], resolution: Resolution) -> list[SendResult]:
        """End half messages; an error, or outcomes that do not fit, leave all of them unsure."""
        if not halves:
            return []
        try:
            outcomes = HalfMessages.of(self.broker).end(halves, resolution)
        except Exception as error:
            reason = f"Broker {self.broker.alias!r} raised {type(error).__name__} at {resolution}: {error}"
            logger.exception("%s Topics: %s.", reason, sorted({half.topic for half in halves}))
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(halves)
        if len(outcomes) != len(halves):
            reason = f"Broker {self.broker.alias!r} gave {len(outcomes)} outcomes for {len(halves)} half messages."
            logger.error("%s", reason)
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(halves)
        return outcomes

    def conclude(self, ends: Sequence[Ends]) -> set[int]:
        """
        Write down how commits ended: SENT, still open, or rule R for half messages that the broker has no more.

        Returns:
            The ids of the batches that are SENT now.
        """
        complete = []
        for one in ends:
            if one.gone:
                self._return_gone(one)
            elif one.unanswered:
                self._leave_open(one)
            else:
                complete.append(one.batch)
        return self.mark(complete, state=State.PREPARED)

    def _return_gone(self, ends: Ends) -> None:
        """Rule R: have decided messages sent again under a new token."""
        batch = ends.batch
        if len(batch.message_ids) == 1:
            held = self.parter.return_one(batch, ends.gone[1])
        else:
            held = self.parter.split(
                batch,
                {position: Unaccepted(SplitReason.DISCARDED, reason) for position, reason in ends.gone.items()},
                state=State.PREPARED,
                next_state=State.PREPARED if ends.unanswered else State.SENT,
                half_ids=[None if p in ends.gone else half for p, half in enumerate(batch.half_ids, 1)],
                open_positions=list(ends.unanswered) or None,
            )
        if not held:
            self._is_mine(batch, "rule R")

    def _leave_open(self, ends: Ends) -> None:
        batch = ends.batch
        if self.connection.execute(OPEN, [list(ends.unanswered), batch.id, batch.attempt]).fetchone() is None:
            self._is_mine(batch, "open")

    def _standing(self, fared: BatchSendResult) -> list[int]:
        """Give what an earlier write of this decision made mine; else roll my half messages back."""
        batch = fared.batch
        row = self.connection.execute(REREAD, [batch.id]).fetchone()
        if row is None:
            self._lost(batch, "decide")
            return []
        state, attempt, half_ids, split = row
        if attempt == batch.attempt and state in (State.PREPARED, State.SENT):
            return [p for p, half in fared.accepted.items() if p not in split and half_ids[p - 1] == half]
        self._lost(batch, "decide")
        halves = [
            HalfRef(batch.topic, half, batch.message_ids[p - 1], fared.half_places.get(p, ""))
            for p, half in fared.accepted.items()
        ]
        self.end(halves, Resolution.ROLLBACK)
        return []

    def _is_mine(self, batch: Batch | PreparedBatch, step: str) -> bool:
        """Read again after a write that matched nothing: was it written before, by this attempt?"""
        row = self.connection.execute(REREAD, [batch.id]).fetchone()
        if row is not None and row[1] == batch.attempt and row[0] in (State.PREPARED, State.SENT):
            return True
        self._lost(batch, step)
        return False

    def _lost(self, batch: Batch | PreparedBatch, step: str) -> None:
        self.fences_lost += 1
        logger.warning("Fence lost at %s: batch %s is no longer in attempt %s.", step, batch.id, batch.attempt)
        signals.fence_lost.send_robust(sender=Committer, batch_id=batch.id, attempt=batch.attempt, step=step)

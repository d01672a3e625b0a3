"""
Decide to commit half messages, commit them, and mark their batches SENT.

THE FENCE. Each write names the batch's state and attempt. When it matches no row, another process has taken the batch
over, or this write was done before and its answer was lost. So the row is read again. If this attempt has decided
it, the decision stands, and its half messages are committed. In any other state, the half messages of this attempt are
rolled back. Without a row, or without an answer of the database: nothing is sent, and the check-back settles it.

THE ORDER. Half messages are stored, then the decision is written, then they are committed. Nothing is committed before
it is decided. A decision is undone only by a resend after discard, or by an operator where nothing can be proved.

THE WINDOW. Where a second end makes a second copy, only the process that wrote the decision, or took the batch over,
sends ends, and it sends none after the broker's window is over. It measures the window from just before that write; the
database measures `ends_until` from within it, and so ends later. Commits without an answer by then stay open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any

from outbox import signals, tracing
from outbox.batches.batch import Batch, BatchSendResult, PreparedBatch, SplitReason, Unaccepted
from outbox.batches.fence import read_step
from outbox.batches.split import runs
from outbox.batches.steps import decide, leave_open, mark_sent
from outbox.brokers.base import Broker, Ended, EndSemantics, HalfRef, SendResult, SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.database import Connection
from outbox.logs import get_logger, log_fields
from outbox.message import Resolution
from outbox.models import State
from outbox.relay.splitter import Splitter

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """
    The part of a batch that may be committed.

    Args:
        is_fresh: this call wrote the decision, so nothing of it can have been committed before.
    """

    batch: PreparedBatch
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class CommitResult:
    """
    How the commits of a batch ended. Positions that are in neither dict are committed.

    Args:
        gone: position -> why its half message does not exist any more: discarded, or unproven.
        unanswered: position -> the broker's result, where the commit stays open.
    """

    batch: PreparedBatch
    gone: dict[int, Unaccepted] = field(default_factory=dict)
    unanswered: dict[int, SendResult] = field(default_factory=dict)


@dataclass(slots=True)
class Committer:
    """
    Decides, commits and marks the batches of one relay.

    Args:
        source: the stable id of the database.
        clock: a monotonic clock, in seconds.
    """

    connection: Connection
    broker: Broker
    splitter: Splitter
    source: str = ""
    clock: Callable[[], float] = time.monotonic
    fences_lost: int = 0

    @property
    def may_repeat_ends(self) -> bool:
        """Whether a second end of a half message does no harm."""
        return HalfMessages.of(self.broker).end_semantics is EndSemantics.IDEMPOTENT

    @property
    def window(self) -> timedelta | None:
        """How long the half messages of a decision may be ended. None: at any time."""
        return HalfMessages.of(self.broker).end_window

    def return_unaccepted(self, result: BatchSendResult) -> bool:
        """
        Return the messages that were not accepted, where no half message is left to decide; the rest of the batch is SENT.

        Where no message was accepted, and all or none of them are dead, the batch itself becomes dead or is released.

        Returns:
            False when the fence was lost.
        """
        leaving = runs(result.unaccepted)
        if not result.accepted and (len(leaving) == 1 or not any(run.is_dead for run in leaving)):
            is_written = self.splitter.return_batch(result.batch, result.unaccepted)
        else:
            is_written = self.splitter.split(result.batch, result.unaccepted, state=State.CLAIMED, next_state=State.SENT)
        return is_written or self._is_mine(result.batch, "split")

    def mark(self, batches: Iterable[Batch | PreparedBatch], *, state: State) -> set[int]:
        """Mark batches in a state SENT; return the ids of those that this relay has marked, now or in an earlier call."""
        wanted = {batch.id: batch for batch in batches}
        if not wanted:
            return set()
        marked = mark_sent(self.connection, wanted.values(), state=state)
        for batch in (wanted[batch_id] for batch_id in marked):
            ids = (batch.message_ids[position - 1] for position in batch.positions)
            tracing.note_sent(self.broker.alias, batch.topic, ids)
        return marked | {batch.id for batch in wanted.values() if batch.id not in marked and self._is_mine(batch, "mark")}

    def decide(self, result: BatchSendResult) -> Decision | None:
        """
        Decide to commit the half messages that were accepted; the other positions leave the batch.

        Returns:
            None when the fence was lost: nothing may be committed, and these half messages are rolled back.
        """
        batch, unaccepted = result.batch, result.unaccepted
        half_ids = [result.accepted.get(position) for position in range(1, len(batch.message_ids) + 1)]
        places, window = result.half_places, self.window
        if unaccepted:
            is_written = self.splitter.split(
                batch,
                unaccepted,
                state=State.CLAIMED,
                next_state=State.PREPARED,
                half_ids=half_ids,
                half_places=places,
                window=window,
            )
        else:
            is_written = decide(self.connection, batch, half_ids, half_places=places, window=window)
        positions = sorted(result.accepted) if is_written else self._decided_before(result)
        prepared = PreparedBatch(
            batch.id, batch.attempt, batch.topic, batch.message_ids, half_ids, positions, batch.tries, places, self.source
        )
        return Decision(prepared, is_fresh=is_written) if positions else None

    def commit(self, decisions: Sequence[Decision], *, since: float) -> list[CommitResult]:
        """
        Commit the half messages that this relay has decided to commit and may still end.

        Args:
            since: the clock's time just before the first of these decisions was written.

        Returns:
            The results; none for batches that are left to the sweep, because the window is over, or because an earlier call
            wrote the decision and may have committed them.
        """
        if self.may_repeat_ends:
            return self.commit_again([decision.batch for decision in decisions])
        if self.is_over(since):
            return []
        return self._commit([decision.batch for decision in decisions if decision.is_fresh], within=self.left(since))

    def commit_again(self, batches: Sequence[PreparedBatch]) -> list[CommitResult]:
        """Commit the open half messages of batches, where a second end does no harm."""
        return self._commit(batches, within=None)

    def left(self, since: float) -> timedelta | None:
        """Return the rest of the window that began at a time of the clock. None: it has no end."""
        return None if self.window is None else self.window - timedelta(seconds=self.clock() - since)

    def is_over(self, since: float) -> bool:
        """Return whether the window that began at a time of the clock is over."""
        left = self.left(since)
        return left is not None and left <= timedelta(0)

    def _commit(self, batches: Sequence[PreparedBatch], *, within: timedelta | None) -> list[CommitResult]:
        outcomes = iter(self.end([half for batch in batches for half in batch.halves()], Resolution.COMMIT, within=within))
        return [self._read(batch, islice(outcomes, len(batch.positions))) for batch in batches]

    def _read(self, batch: PreparedBatch, outcomes: Iterable[SendResult]) -> CommitResult:
        """Return the result of a batch's commits from their outcomes, one per position."""
        result = CommitResult(batch)
        accepted, committed = SendStatus.ACCEPTED, Ended.COMMITTED
        for position, outcome in zip(batch.positions, outcomes, strict=True):
            if outcome.status is accepted and outcome.ended is committed:
                continue
            if outcome.status is not accepted or outcome.ended in (None, Ended.NOT_FOUND):
                result.unanswered[position] = outcome
            else:
                self._note_other_end(result, position, outcome)
        return result

    def _note_other_end(self, result: CommitResult, position: int, outcome: SendResult) -> None:
        """Note another end than a commit; only a broker that remembers ends is believed."""
        if self.may_repeat_ends:
            reason = f"The broker has {outcome.ended} its half message. {outcome.reason}".strip()
            result.gone[position] = Unaccepted(SplitReason.DISCARDED, reason)
        else:
            result.unanswered[position] = outcome

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        """
        End half messages. After an error, or a wrong number of outcomes, all of them are UNSURE.

        Args:
            within: no end is sent later than that from now. None: no limit.
        """
        if not halves:
            return []
        try:
            outcomes = HalfMessages.of(self.broker).end(halves, resolution, within=within)
        except Exception as error:
            reason = f"Broker {self.broker.alias!r} raised {type(error).__name__} at {resolution}: {error}"
            logger.exception("%s Topics: %s.", reason, sorted({half.topic for half in halves}), extra=self._log_fields(halves))
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(halves)
        if len(outcomes) != len(halves):
            reason = f"Broker {self.broker.alias!r} returned {len(outcomes)} results for {len(halves)} half messages."
            logger.error("%s", reason, extra=self._log_fields(halves))
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(halves)
        return outcomes

    def _log_fields(self, halves: Sequence[HalfRef]) -> dict[str, Any]:
        topics, message_ids = (half.topic for half in halves), (half.message_id for half in halves)
        return log_fields(broker=self.broker.alias, topics=topics, message_ids=message_ids)

    def conclude(self, results: Sequence[CommitResult]) -> set[int]:
        """
        Record how commits ended: batches are SENT, stay open, or are sent again where the broker discarded half messages.

        Returns:
            The ids of the batches that are SENT now.
        """
        complete = []
        for result in results:
            if result.gone:
                self._return_gone(result)
            elif result.unanswered:
                self._leave_open(result)
            else:
                complete.append(result.batch)
        return self.mark(complete, state=State.PREPARED)

    def _return_gone(self, result: CommitResult) -> None:
        """Send decided messages again under a new token (resend after discard), or give up those that cannot be proved."""
        batch, gone = result.batch, result.gone
        if len(batch.message_ids) == 1:
            is_written = self.splitter.return_prepared(batch, gone[1])
        else:
            is_written = self.splitter.split(
                batch,
                gone,
                state=State.PREPARED,
                next_state=State.PREPARED if result.unanswered else State.SENT,
                half_ids=[None if p in gone else half for p, half in enumerate(batch.half_ids, 1)],
                half_places={p: place for p, place in batch.half_places.items() if p not in gone},
                open_positions=list(result.unanswered) or None,
            )
        if not is_written:
            self._is_mine(batch, "resend after discard")

    def _leave_open(self, result: CommitResult) -> None:
        """Store which commits are open, if that has changed: the sweep comes back to a stuck batch again and again."""
        batch = result.batch
        if set(result.unanswered) == set(batch.positions):
            return
        if not leave_open(self.connection, batch, sorted(result.unanswered)):
            self._is_mine(batch, "open")

    def _decided_before(self, result: BatchSendResult) -> list[int]:
        """Return the positions that an earlier write of this decision contains; without one, roll the half messages back."""
        batch = result.batch
        step = read_step(self.connection, batch.id)
        if step is not None and step.half_ids is not None and step.is_decided_by(batch.attempt):
            half_ids = step.half_ids
            return [p for p, half in result.accepted.items() if p not in step.split and half_ids[p - 1] == half]
        self._lost(batch, "decide")
        if step is not None:
            self.end([result.half(position) for position in result.accepted], Resolution.ROLLBACK)
        return []

    def _is_mine(self, batch: Batch | PreparedBatch, step: str) -> bool:
        """Read the row again after a write that matched no row; return whether this attempt wrote it before."""
        found = read_step(self.connection, batch.id)
        if found is not None and found.is_decided_by(batch.attempt):
            return True
        self._lost(batch, step)
        return False

    def _lost(self, batch: Batch | PreparedBatch, step: str) -> None:
        self.fences_lost += 1
        extra = log_fields(batch=batch.id, topic=batch.topic, attempt=batch.attempt)
        logger.warning("Fence lost at %s: batch %s is no longer in attempt %s.", step, batch.id, batch.attempt, extra=extra)
        signals.fence_lost.send_robust(sender=Committer, batch_id=batch.id, attempt=batch.attempt, step=step)

"""
Write the decision to commit half messages, commit them, and mark their batches SENT.

To end a half message is to commit it or roll it back; an end is the request for that. A commit is open while the broker has not
confirmed it. To settle a batch is to find out what became of its open commits, and to record that.

THE FENCE. Each write names the batch's state and attempt. If a write matches no row, another process has taken the batch over, or
the same write was done before and its answer was lost. So the row is read again. If this attempt has decided the batch, the
decision stands, and its half messages are committed now or by the sweep. If not, the half messages of this attempt are rolled
back. If the row is gone, or the database does not answer, no end is sent, and a check-back settles the half messages.

THE ORDER. Half messages are stored, then the decision is written, then they are committed. No half message is committed before
the decision is written. A decision is undone only if the broker no longer has a half message: then its message is sent again
under a new token (resend after discard), or becomes DEAD if nothing proves whether it was published, so that an operator decides.

THE WINDOW. On a broker that stores a second copy for a second commit, only one process may send ends: the one that wrote the
decision, or took the batch over, last. That process sends no more ends after the broker's commit window, which it measures from
just before that write. The database computes `ends_until` during the write, so `ends_until` is never earlier than the process's
own deadline. Commits that have no answer by then stay open.

THE SWEEP settles batches that were decided long ago and still have open commits. On a broker on which a second end does no harm,
the sweep repeats the commits, and looks up half messages that the broker then does not find. On other brokers, a half message may
be ended only once. So the sweep takes the batch over first (`batches/take_over.py`), and looks up its half messages before it
ends any of them:

- visible: the half message was committed;
- hidden: the sweep commits it, and it counts as sent if the broker confirms that;
- gone, though the broker still keeps messages of that age: it was never published, and is sent again (resend after discard);
- gone, and the broker no longer keeps messages of that age: nothing proves whether it was published. It becomes DEAD, and an
  operator decides;
- unknown: its commit stays open until the next sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

import msgspec

from outbox import signals, tracing
from outbox.batches.batch import BatchSendResult, ClaimedBatch, PreparedBatch, SplitReason, Unaccepted
from outbox.batches.fence import read_step
from outbox.batches.split import runs, split_at_commit, split_at_decision, split_at_send
from outbox.batches.steps import decide, leave_open, mark_sent
from outbox.batches.take_over import read_prepared, renew, take_over
from outbox.brokers.base import Broker, Ended, EndSemantics, HalfRef, HalfStatus, SendResult, SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.database import Connection
from outbox.errors import FenceLost
from outbox.logs import get_logger, log_fields, safe_text
from outbox.message import Resolution
from outbox.models import State
from outbox.relay.splitter import Splitter

logger = get_logger(__name__)


class CommitResult(msgspec.Struct, frozen=True):
    """
    The result of committing the half messages of a batch. Positions that are in neither dict are committed.

    Args:
        gone: position -> why its half message no longer exists: discarded, or unproven.
        unanswered: position -> the broker's result, for commits that stay open.
    """

    batch: PreparedBatch
    gone: dict[int, Unaccepted] = msgspec.field(default_factory=dict)
    unanswered: dict[int, SendResult] = msgspec.field(default_factory=dict)


class Committer(msgspec.Struct):
    """
    Decides, commits and marks the batches of one relay.

    Args:
        source: the stable id of the database.
        clock: a monotonic clock, in seconds.
        fences_lost: how many steps could not be written, since the batch was no longer in the attempt.
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
        """For how long after a decision its half messages may be ended; None for no limit."""
        return HalfMessages.of(self.broker).commit_window

    def return_unaccepted(self, result: BatchSendResult) -> bool:
        """
        Release the messages of a batch that the broker did not accept, so that they are claimed again, or mark them DEAD.

        Call it for a batch that was sent in one phase, or of which nothing was accepted; otherwise call `decide`. Accepted
        messages stay in the batch, which becomes SENT; the others are split off. If none was accepted, and all of them form one
        run (see `runs`) or none becomes DEAD, the batch itself is released or becomes DEAD.

        Returns:
            Whether this attempt has written the change, now or in an earlier call.
        """
        unaccepted_runs = runs(result.unaccepted)
        try:
            if not result.accepted and (len(unaccepted_runs) == 1 or not any(run.is_dead for run in unaccepted_runs)):
                self.splitter.return_batch(result.batch, result.unaccepted)
            else:
                self.splitter.split(result.batch, result.unaccepted, split_at_send)
        except FenceLost:
            return self._has_written(result.batch, "split")
        return True

    def mark(self, batches: Iterable[ClaimedBatch | PreparedBatch], *, state: State) -> set[int]:
        """Mark batches that are in `state` as SENT; return the ids of those that this relay has marked, now or earlier."""
        wanted = {batch.id: batch for batch in batches}
        if not wanted:
            return set()
        marked = mark_sent(self.connection, wanted.values(), state=state)
        for batch in (wanted[batch_id] for batch_id in marked):
            ids = (batch.message_ids[position - 1] for position in batch.positions)
            tracing.record_sent(self.broker.alias, batch.topic, ids)
        return marked | {batch.id for batch in wanted.values() if batch.id not in marked and self._has_written(batch, "mark")}

    def decide(self, result: BatchSendResult) -> PreparedBatch | None:
        """
        Decide to commit the half messages that were accepted; the other positions are split off the batch.

        Returns:
            The batch to commit. None if this attempt could not decide it, since another process has the batch or the row is gone.
            In the first case, these half messages are rolled back.
        """
        batch, unaccepted = result.batch, result.unaccepted
        half_ids = [result.accepted.get(position) for position in range(1, len(batch.message_ids) + 1)]
        places, window = result.half_places, self.window
        try:
            if unaccepted:
                arguments = {"half_ids": half_ids, "half_places": places, "window": window}
                self.splitter.split(batch, unaccepted, split_at_decision, **arguments)
            else:
                decide(self.connection, batch, half_ids, half_places=places, window=window)
            positions, is_fresh = sorted(result.accepted), True
        except FenceLost:
            positions, is_fresh = self._decided_before(result), False
        fields = (batch.id, batch.attempt, batch.topic, batch.message_ids, half_ids, positions, batch.failures, places)
        return PreparedBatch(*fields, self.source, is_fresh=is_fresh) if positions else None

    def commit(self, decided: Sequence[PreparedBatch], *, since: float) -> list[CommitResult]:
        """
        Commit the half messages that this relay has decided to commit and may still end.

        Args:
            since: the clock's time just before the first of these batches was decided.

        Returns:
            The results. Batches without a result are left to the sweep, because the window is over, or because an earlier call
            wrote the decision and may have committed their half messages.
        """
        if self.may_repeat_ends:
            return self.commit_halves(decided)
        if self.is_over(since):
            return []
        return self.commit_halves([batch for batch in decided if batch.is_fresh], within=self.remaining(since))

    def remaining(self, since: float) -> timedelta | None:
        """Return the rest of the commit window that began at `since`, a time of the clock; None for no limit."""
        return None if self.window is None else self.window - timedelta(seconds=self.clock() - since)

    def is_over(self, since: float) -> bool:
        """Return whether the commit window that began at `since`, a time of the clock, is over."""
        remaining = self.remaining(since)
        return remaining is not None and remaining <= timedelta(0)

    def commit_halves(self, batches: Sequence[PreparedBatch], *, within: timedelta | None = None) -> list[CommitResult]:
        """Commit the half messages of batches whose commits are open; `within` as for `end`."""
        outcomes = iter(self.end([half for batch in batches for half in batch.halves()], Resolution.COMMIT, within=within))
        return [self._result_of(batch, islice(outcomes, len(batch.positions))) for batch in batches]

    def _result_of(self, batch: PreparedBatch, outcomes: Iterable[SendResult]) -> CommitResult:
        """Return the result of a batch from the outcomes of its commits, one per position."""
        result = CommitResult(batch)
        accepted, committed = SendStatus.ACCEPTED, Ended.COMMITTED
        for position, outcome in zip(batch.positions, outcomes, strict=True):
            if outcome.status is accepted and outcome.ended is committed:
                continue
            if outcome.status is not accepted or outcome.ended in (None, Ended.NOT_FOUND):
                result.unanswered[position] = outcome
            else:
                self._record_other_end(result, position, outcome)
        return result

    def _record_other_end(self, result: CommitResult, position: int, outcome: SendResult) -> None:
        """
        Record that the broker reports another end than a commit, such as a rollback.

        Such a report is believed only if ends may be repeated on the broker, which then remembers how each half message ended. On
        other brokers, the commit counts as unanswered.
        """
        if self.may_repeat_ends:
            reason = f"The broker has {outcome.ended} its half message. {outcome.reason}".strip()
            result.gone[position] = Unaccepted(SplitReason.DISCARDED, reason)
        else:
            result.unanswered[position] = outcome

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        """
        End half messages; return one result for each. After an error, or a wrong number of results, all of them are UNSURE.

        Args:
            within: the time from now after which no more ends are sent; None for no limit.
        """
        if not halves:
            return []
        try:
            outcomes = HalfMessages.of(self.broker).end(halves, resolution, within=within)
        except Exception as error:
            reason = f"Broker {self.broker.alias!r} raised {type(error).__name__} at {resolution}: {safe_text(error)}"
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
        Record the results of commits.

        A batch is marked SENT if all its half messages are committed. Open commits are stored. Messages whose half messages are
        gone are split off, to be sent again or to become dead.

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
        """Release messages whose half messages are gone, to be sent under a new token; mark those DEAD that are unproven."""
        batch, gone = result.batch, result.gone
        try:
            if len(batch.message_ids) == 1:
                self.splitter.return_prepared(batch, gone[1])
            else:
                self.splitter.split(batch, gone, split_at_commit, open_positions=list(result.unanswered))
        except FenceLost:
            self._has_written(batch, "resend after discard")

    def _leave_open(self, result: CommitResult) -> None:
        """Store which commits are open. If they are the same as before, write nothing: the sweep tries a stuck batch often."""
        batch = result.batch
        if set(result.unanswered) == set(batch.positions):
            return
        try:
            leave_open(self.connection, batch, sorted(result.unanswered))
        except FenceLost:
            self._has_written(batch, "open")

    def _decided_before(self, result: BatchSendResult) -> list[int]:
        """
        Return the positions that an earlier call of this attempt has decided, after a lost fence.

        If there is no such decision, report the lost fence, and roll the half messages back unless the batch's row is gone.
        """
        batch = result.batch
        is_decided, half_ids, split = read_step(self.connection, batch.id, batch.attempt)
        if half_ids is not None and is_decided:
            return [p for p, half in result.accepted.items() if p not in split and half_ids[p - 1] == half]
        self._report_fence_lost(batch, "decide")
        if is_decided is not None:
            self.end([result.half(position) for position in result.accepted], Resolution.ROLLBACK)
        return []

    def _has_written(self, batch: ClaimedBatch | PreparedBatch, step: str) -> bool:
        """Read the row again after a lost fence; return whether an earlier call of this attempt wrote the step."""
        is_decided, *_ = read_step(self.connection, batch.id, batch.attempt)
        if is_decided:
            return True
        self._report_fence_lost(batch, step)
        return False

    def _report_fence_lost(self, batch: ClaimedBatch | PreparedBatch, step: str) -> None:
        self.fences_lost += 1
        extra = log_fields(batch=batch.id, topic=batch.topic, attempt=batch.attempt)
        logger.warning("Fence lost at step %r: batch %s is no longer in attempt %s.", step, batch.id, batch.attempt, extra=extra)
        signals.fence_lost.send_robust(sender=Committer, batch_id=batch.id, attempt=batch.attempt, step=step)


# The maximum of batches, and of their messages, that one statement reads and one call to the broker ends.
PAGE_LIMIT = {"batches": 500, "messages": 2000}

# After this time a sweep takes no further page, since an outage leaves thousands of batches open. A relay sweeps once a second,
# and has to relay messages in between.
SWEEP_SECONDS = 1.0

UNANSWERED = SendResult(SendStatus.UNSURE, reason="Its commit has no answer yet.")

HALF_GONE = Unaccepted(SplitReason.DISCARDED, "The broker has neither its half message nor the message.")

UNPROVEN = Unaccepted(
    SplitReason.UNPROVEN,
    "The broker has neither its half message nor the message, and no longer keeps messages that old: whether it was published "
    "is unknown. Replay sends it, perhaps a second time; discard accepts it as published.",
)


class SweepResult(msgspec.Struct):
    """
    The counts of a sweep.

    Args:
        batches: batches that were read or taken over.
        sent: messages in batches that are SENT now.
        returned: messages that are sent again (resend after discard).
        dead: messages that are DEAD, since it is unknown whether they were published.
    """

    batches: int = 0
    sent: int = 0
    returned: int = 0
    dead: int = 0


class Sweeper(msgspec.Struct):
    """
    Settles the decided batches of one broker, oldest first.

    Args:
        age: on brokers on which a second end does no harm, a batch decided more recently is left to its relay. On other brokers,
            the commit window if the broker names none.
        after: id of the last batch that was read.
    """

    connection: Connection
    committer: Committer
    age: timedelta
    after: int = 0

    def sweep(self) -> SweepResult:
        """Settle decided batches until none is left or SWEEP_SECONDS are over; the next call continues with the rest."""
        clock = self.committer.clock
        deadline = clock() + SWEEP_SECONDS
        settle = self._repeat_ends if self.committer.may_repeat_ends else self._take_over
        done = SweepResult()
        while results := settle():
            sent = self.committer.conclude(results)
            gone = [end.reason for result in results for end in result.gone.values()]
            done.batches += len(results)
            done.sent += sum(len(result.batch.positions) for result in results if result.batch.id in sent)
            done.returned += gone.count(SplitReason.DISCARDED)
            done.dead += gone.count(SplitReason.UNPROVEN)
            if clock() >= deadline:
                break
        return done

    def _repeat_ends(self) -> list[CommitResult]:
        """Commit the next batches again, and look up half messages that the broker does not find."""
        alias = self.committer.broker.alias
        batches = read_prepared(self.connection, broker=alias, age=self.age, after=self.after, **PAGE_LIMIT)
        self.after = batches[-1].id if batches else 0  # so that stuck batches are read again only after all others
        results = self.committer.commit_halves(batches)
        not_found = [(result, p) for result in results for p, end in result.unanswered.items() if end.ended is Ended.NOT_FOUND]
        self._look_up(not_found)
        return results

    def _take_over(self) -> list[CommitResult]:
        """Take over the next batches whose `ends_until` has passed, and commit their half messages that are still hidden."""
        broker = HalfMessages.of(self.committer.broker)
        window = broker.commit_window or self.age
        batches = take_over(self.connection, broker=broker.alias, window=window, **PAGE_LIMIT)
        results = [CommitResult(batch, unanswered=dict.fromkeys(batch.positions, UNANSWERED)) for batch in batches]
        hidden = self._look_up([(result, position) for result in results for position in result.batch.positions])
        if hidden:
            began = self.committer.clock()  # a new window begins, since the look-up may have taken longer than the last one
            renewed = renew(self.connection, {result.batch.id: result.batch for result, _ in hidden}.values(), window=window)
            hidden = [(result, position) for result, position in hidden if result.batch.id in renewed]
            halves = [result.batch.half(position) for result, position in hidden]
            ends = self.committer.end(halves, Resolution.COMMIT, within=self.committer.remaining(began))
            for (commit_result, position), end in zip(hidden, ends, strict=True):
                if end.status is SendStatus.ACCEPTED and end.ended is Ended.COMMITTED:
                    del commit_result.unanswered[position]
        return results

    def _look_up(self, wanted: Sequence[tuple[CommitResult, int]]) -> list[tuple[CommitResult, int]]:
        """Look up half messages, update their results if they are visible or gone, and return those that are still hidden."""
        hidden = []
        for (result, position), status in zip(wanted, self._statuses(wanted), strict=True):
            match status:
                case HalfStatus.VISIBLE:
                    del result.unanswered[position]
                case HalfStatus.HIDDEN:
                    hidden.append((result, position))
                case HalfStatus.GONE | HalfStatus.UNPROVEN:
                    del result.unanswered[position]
                    result.gone[position] = HALF_GONE if status is HalfStatus.GONE else UNPROVEN
                case HalfStatus.UNKNOWN:
                    pass
        return hidden

    def _statuses(self, wanted: Sequence[tuple[CommitResult, int]]) -> list[HalfStatus]:
        """Look up half messages in one call. After an error, or a wrong number of answers, all of them are UNKNOWN."""
        halves: list[HalfRef] = [result.batch.half(position) for result, position in wanted]
        if not halves:
            return []
        broker = HalfMessages.of(self.committer.broker)
        extra = log_fields(
            broker=broker.alias, topics=(half.topic for half in halves), batches=(result.batch.id for result, _ in wanted)
        )
        try:
            statuses = broker.look_up_halves(halves)
        except Exception:
            text = "Broker %r could not look up %s half messages; the next sweep tries again."
            logger.exception(text, broker.alias, len(halves), extra=extra)
            return [HalfStatus.UNKNOWN] * len(halves)
        if len(statuses) != len(halves):
            text = "Broker %r returned %s statuses for %s half messages; the next sweep tries again."
            logger.error(text, broker.alias, len(statuses), len(halves), extra=extra)
            return [HalfStatus.UNKNOWN] * len(halves)
        return statuses

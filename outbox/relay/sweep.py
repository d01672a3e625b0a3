"""
The sweep: settle batches that were decided long ago and still have open commits.

Where a second end does no harm, the commit is repeated; half messages that the broker then does not find are looked up.
Elsewhere a half message may be ended only once, so the batch is taken over first (`batches/take_over.py`), and its half
messages are looked up before any of them is ended:

- visible: it was committed;
- hidden: it is committed now, and counts as sent when that is confirmed;
- gone, and the broker still keeps messages that old: it was never published, and is sent again (resend after discard);
- gone, and the broker no longer keeps messages that old: nothing is proved. It is DEAD, and an operator decides;
- unknown: it stays open for the next sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta

from outbox.batches.batch import PreparedBatch, SplitReason, Unaccepted
from outbox.batches.take_over import Limit, read_prepared, renew, take_over
from outbox.brokers.base import Ended, HalfRef, HalfStatus, SendResult, SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.database import Connection
from outbox.logs import get_logger, log_fields
from outbox.message import Resolution
from outbox.relay.commit import CommitResult, Committer

logger = get_logger(__name__)

# Read in one statement, and ended in one call to the broker.
PAGE_LIMIT = Limit(batches=500, messages=2000)

# One sweep takes at most that long: an outage leaves thousands of batches open. A relay sweeps once a second, and relays
# in between.
SWEEP_SECONDS = 1.0

UNANSWERED = SendResult(SendStatus.UNSURE, reason="Its commit has no answer yet.")

GONE = Unaccepted(SplitReason.DISCARDED, "The broker has neither its half message nor the message.")

UNPROVEN = Unaccepted(
    SplitReason.UNPROVEN,
    "The broker has neither its half message nor the message, and no longer keeps messages that old: whether it was published "
    "is unknown. Retry sends it, perhaps a second time; skip accepts it as published.",
)


@dataclass(slots=True)
class SweepResult:
    """
    The counts of a sweep.

    Args:
        batches: batches looked at.
        sent: messages in batches that are SENT now.
        returned: messages that are sent again (resend after discard).
        dead: messages of which it is unknown whether they were published.
    """

    batches: int = 0
    sent: int = 0
    returned: int = 0
    dead: int = 0

    def add(self, other: SweepResult) -> None:
        """Add the counts of more batches."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(slots=True)
class Sweeper:
    """
    Settles the decided batches of one broker, oldest first.

    Args:
        age: where a second end does no harm, a batch decided more recently is left to its relay.
        after: id of the last batch looked at.
    """

    connection: Connection
    committer: Committer
    age: timedelta
    after: int = 0

    def sweep(self) -> SweepResult:
        """Settle decided batches until none is left or a second is over; the next call continues there."""
        clock = self.committer.clock
        ends_at = clock() + SWEEP_SECONDS
        settle = self._repeat_ends if self.committer.may_repeat_ends else self._take_over
        done = SweepResult()
        while results := settle():
            done.add(self._conclude(results))
            if clock() >= ends_at:
                break
        return done

    def _conclude(self, results: Sequence[CommitResult]) -> SweepResult:
        sent = self.committer.conclude(results)
        gone = [one.reason for result in results for one in result.gone.values()]
        return SweepResult(
            batches=len(results),
            sent=sum(len(result.batch.positions) for result in results if result.batch.id in sent),
            returned=gone.count(SplitReason.DISCARDED),
            dead=gone.count(SplitReason.UNPROVEN),
        )

    def _repeat_ends(self) -> list[CommitResult]:
        """Commit the next batches again, where a second end does no harm; look up half messages that the broker does not find."""
        alias = self.committer.broker.alias
        batches = read_prepared(self.connection, broker=alias, age=self.age, after=self.after, limit=PAGE_LIMIT)
        self.after = batches[-1].id if batches else 0  # batches that stay stuck come again after all others
        results = self.committer.commit_again(batches)
        not_found = [(one, p) for one in results for p, end in one.unanswered.items() if end.ended is Ended.NOT_FOUND]
        self._look_up(not_found)
        return results

    def _take_over(self) -> list[CommitResult]:
        """Take over the next batches whose deciders' time is over, and commit half messages that are still hidden."""
        broker = HalfMessages.of(self.committer.broker)
        window = broker.commit_window or self.age
        batches = take_over(self.connection, broker=broker.alias, window=window, limit=PAGE_LIMIT)
        results = [_all_open(batch) for batch in batches]
        hidden = self._look_up([(one, position) for one in results for position in one.batch.positions])
        if hidden:
            began = self.committer.clock()  # the look-up may have taken longer than the window
            held = renew(self.connection, {one.batch.id: one.batch for one, _ in hidden}.values(), window=window)
            hidden = [(one, position) for one, position in hidden if one.batch.id in held]
            halves = [one.batch.half(position) for one, position in hidden]
            ends = self.committer.end(halves, Resolution.COMMIT, within=self.committer.left(began))
            for (one, position), end in zip(hidden, ends, strict=True):
                if end.status is SendStatus.ACCEPTED and end.ended is Ended.COMMITTED:
                    del one.unanswered[position]
        return results

    def _look_up(self, wanted: Sequence[tuple[CommitResult, int]]) -> list[tuple[CommitResult, int]]:
        """Look up half messages, and note in their results those that are visible or gone; return those still hidden."""
        hidden = []
        for (one, position), status in zip(wanted, self._statuses(wanted), strict=True):
            match status:
                case HalfStatus.VISIBLE:
                    del one.unanswered[position]
                case HalfStatus.HIDDEN:
                    hidden.append((one, position))
                case HalfStatus.GONE | HalfStatus.UNPROVEN:
                    del one.unanswered[position]
                    one.gone[position] = GONE if status is HalfStatus.GONE else UNPROVEN
                case HalfStatus.UNKNOWN:
                    pass
        return hidden

    def _statuses(self, wanted: Sequence[tuple[CommitResult, int]]) -> list[HalfStatus]:
        """Look up half messages in one call. After an error, or a wrong number of answers, all of them are UNKNOWN."""
        halves: list[HalfRef] = [one.batch.half(position) for one, position in wanted]
        if not halves:
            return []
        broker = HalfMessages.of(self.committer.broker)
        extra = log_fields(
            broker=broker.alias, topics=(half.topic for half in halves), batches=(one.batch.id for one, _ in wanted)
        )
        try:
            statuses = broker.look_up_halves(halves)
        except Exception:
            logger.exception("Broker %r cannot look %s half messages up.", broker.alias, len(halves), extra=extra)
            return [HalfStatus.UNKNOWN] * len(halves)
        if len(statuses) != len(halves):
            text = "Broker %r returned %s statuses for %s half messages."
            logger.error(text, broker.alias, len(statuses), len(halves), extra=extra)
            return [HalfStatus.UNKNOWN] * len(halves)
        return statuses


def _all_open(batch: PreparedBatch) -> CommitResult:
    return CommitResult(batch, unanswered=dict.fromkeys(batch.positions, UNANSWERED))

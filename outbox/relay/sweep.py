"""
The sweep: what was decided long ago and still has open commits.

Where a second end does no harm, the commit is simply repeated; what the broker then knows no half message of is looked up.
Elsewhere a half message is ended once at most, so the batch is taken over first (`batches/take_over.py`), and its half
messages are looked up before any of them is ended:

- visible: it was sent;
- hidden: it is committed now, and sent when that is confirmed;
- gone, and the broker keeps all that is as old: it was never published, and is sent again (resend after discard);
- gone, and the broker does not keep what is as old: nothing is proved. It is DEAD, and an operator decides;
- not known: it stays open, and the sweep comes back to it.
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

# Taken at once, and handed to the broker in one call.
AT_ONCE = Limit(batches=500, messages=2000)

# One look goes on that long while there is anything to settle: an outage leaves thousands of batches open. A relay looks
# once a second, and relays in between.
LOOK_SECONDS = 1.0

OPEN = SendResult(SendStatus.UNSURE, reason="Its commit has no answer yet.")

GONE = Unaccepted(SplitReason.DISCARDED, "The broker has neither its half message nor the message.")

UNPROVEN = Unaccepted(
    SplitReason.UNPROVEN,
    "The broker has neither its half message nor the message, and no longer keeps what is that old: nobody can tell whether "
    "it was published. Retry sends it, perhaps again; skip accepts it as published.",
)


@dataclass(slots=True)
class SweepResult:
    """
    What a sweep did.

    Args:
        batches: looked at.
        sent: messages in batches that are SENT now.
        returned: messages that are sent again (resend after discard).
        dead: messages of which nobody can tell whether they were published.
    """

    batches: int = 0
    sent: int = 0
    returned: int = 0
    dead: int = 0

    def add(self, other: SweepResult) -> None:
        """Add what was done to more batches."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(slots=True)
class Sweeper:
    """
    Goes through the decided batches of one broker, oldest first.

    Args:
        age: where a second end does no harm, a batch decided more recently is still its relay's.
    """

    connection: Connection
    committer: Committer
    age: timedelta
    after: int = 0

    def sweep(self) -> SweepResult:
        """Settle decided batches until none is left or a second is over; the next call goes on there."""
        clock = self.committer.clock
        ends_at = clock() + LOOK_SECONDS
        settle = self._repeat_ends if self.committer.may_repeat_ends else self._take_over
        done = SweepResult()
        while ends := settle():
            done.add(self._conclude(ends))
            if clock() >= ends_at:
                break
        return done

    def _conclude(self, ends: Sequence[CommitResult]) -> SweepResult:
        sent = self.committer.conclude(ends)
        gone = [one.reason for end in ends for one in end.gone.values()]
        return SweepResult(
            batches=len(ends),
            sent=sum(len(one.batch.positions) for one in ends if one.batch.id in sent),
            returned=gone.count(SplitReason.DISCARDED),
            dead=gone.count(SplitReason.UNPROVEN),
        )

    def _repeat_ends(self) -> list[CommitResult]:
        """Commit the next batches again, where a second end does no harm; look up what the broker knows nothing of."""
        alias = self.committer.broker.alias
        batches = read_prepared(self.connection, broker=alias, age=self.age, after=self.after, limit=AT_ONCE)
        self.after = batches[-1].id if batches else 0  # those that stay stuck are looked at again when all others were
        ends = self.committer.commit_again(batches)
        unknown = [(one, p) for one in ends for p, end in one.unanswered.items() if end.ended is Ended.NOT_FOUND]
        self._look_up(unknown)
        return ends

    def _take_over(self) -> list[CommitResult]:
        """Take the next batches over whose deciders' time is over, and commit what is hidden still."""
        broker = HalfMessages.of(self.committer.broker)
        window = broker.commit_window or self.age
        batches = take_over(self.connection, broker=broker.alias, window=window, limit=AT_ONCE)
        ends = [_all_open(batch) for batch in batches]
        hidden = self._look_up([(one, position) for one in ends for position in one.batch.positions])
        if hidden:
            began = self.committer.clock()  # looking up may have taken longer than the window
            held = renew(self.connection, {one.batch.id: one.batch for one, _ in hidden}.values(), window=window)
            hidden = [(one, position) for one, position in hidden if one.batch.id in held]
            halves = [one.batch.half(position) for one, position in hidden]
            results = self.committer.end(halves, Resolution.COMMIT, within=self.committer.left(began))
            for (one, position), result in zip(hidden, results, strict=True):
                if result.status is SendStatus.ACCEPTED and result.ended is Ended.COMMITTED:
                    del one.unanswered[position]
        return ends

    def _look_up(self, places: Sequence[tuple[CommitResult, int]]) -> list[tuple[CommitResult, int]]:
        """Settle what the broker can tell of half messages. Return those that are hidden still."""
        hidden = []
        for (one, position), status in zip(places, self._statuses(places), strict=True):
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

    def _statuses(self, places: Sequence[tuple[CommitResult, int]]) -> list[HalfStatus]:
        """Look half messages up in one call; an error, or an answer that does not fit, says nothing of any of them."""
        halves: list[HalfRef] = [one.batch.half(position) for one, position in places]
        if not halves:
            return []
        broker = HalfMessages.of(self.committer.broker)
        extra = log_fields(
            broker=broker.alias, topics=(half.topic for half in halves), batches=(one.batch.id for one, _ in places)
        )
        try:
            statuses = broker.look_up_halves(halves)
        except Exception:
            logger.exception("Broker %r cannot look %s half messages up.", broker.alias, len(halves), extra=extra)
            return [HalfStatus.UNKNOWN] * len(halves)
        if len(statuses) != len(halves):
            text = "Broker %r told of %s half messages, asked for %s."
            logger.error(text, broker.alias, len(statuses), len(halves), extra=extra)
            return [HalfStatus.UNKNOWN] * len(halves)
        return statuses


def _all_open(batch: PreparedBatch) -> CommitResult:
    return CommitResult(batch, unanswered=dict.fromkeys(batch.positions, OPEN))

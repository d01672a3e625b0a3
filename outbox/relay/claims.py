"""What one relay claims of one broker: how much at once, and which topics next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

from outbox.batches.batch import Batch
from outbox.batches.claim import TOPICS_PER_CLAIM, Scope, claim, claim_ordered, reclaim
from outbox.database import Connection
from outbox.relay.lane import Lane


@dataclass(slots=True)
class ScanPositions:
    """
    Where to look for a topic's oldest ticket.

    Dead tickets that an old snapshot keeps alive stand before the living ones, and each look from the start passes them
    all. So a claim starts at the last position seen. A ticket committed late may stand before it: now and then one
    starts at 0, once a second, or more often while that takes next to no time.
    """

    clock: Callable[[], float] = monotonic
    positions: dict[int, int] = field(default_factory=dict)
    from_zero_at: float = 0.0

    LONGEST_SECONDS = 1.0
    SHARE = 20  # looks from 0 take at most a twentieth of the time

    def is_due(self) -> bool:
        """Whether the next look shall start at 0."""
        return self.clock() >= self.from_zero_at

    def note_from_zero(self, began: float) -> None:
        """Plan the next look from 0 after one that began at that time."""
        now = self.clock()
        self.from_zero_at = now + min(self.LONGEST_SECONDS, (now - began) * self.SHARE)


@dataclass(slots=True)
class Claims:
    """
    What one relay claims of one broker.

    Args:
        lease: other relays leave a batch alone that long, by the database's clock.
        batch_size: so many messages of a topic at most, and twice as many of all topics together.
        foreign: names of topics that are not this relay's, whatever their rows say.
    """

    connection: Connection
    broker: str
    lane: Lane
    lease: timedelta
    batch_size: int
    scan_positions: ScanPositions = field(default_factory=ScanPositions)
    after: int = 0  # the last topic looked at
    ordered_after: int = 0
    foreign: frozenset[str] = frozenset()

    def claim(self, *, without: Collection[str] = (), limit: int | None = None, only: str | None = None) -> list[Batch]:
        """
        Claim the oldest tickets of the broker's topics without order.

        Args:
            without: names of topics to leave out.
            limit: at most this many messages, of one topic; by default as many as the settings say.
            only: the name of the only topic to look at.
        """
        began = self.scan_positions.clock()
        scan_from = {} if self.scan_positions.is_due() else self.scan_positions.positions
        found = claim(
            self.connection,
            self._scope(without, only),
            lane=self.lane.number,
            lease=self.lease,
            limit=limit or self.batch_size,
            after=self.after,
            topic_limit=_topic_limit(limit),
            scan_from=scan_from,
        )
        if found:
            self.after = found[-1].topic_id
        self.scan_positions.positions |= {topic.topic_id: topic.last_pos for topic in found if topic.last_pos is not None}
        if not scan_from and limit is None:
            self.scan_positions.note_from_zero(began)
        return [topic.batch for topic in found if topic.batch is not None]

    def claim_ordered(self, *, without: Collection[str] = (), limit: int | None = None, only: str | None = None) -> list[Batch]:
        """
        Claim the oldest tickets of ordered topics whose keys are free; arguments as for `claim`.

        Topics whose waiting keys are all held give nothing, and the next ones shall not wait behind them: the look goes on till
        it meets a topic again. Topics may come and go meanwhile.
        """
        seen: set[int] = set()
        while True:
            found = claim_ordered(
                self.connection,
                self._scope(without, only),
                lane=self.lane.number,
                lease=self.lease,
                limit=limit or self.batch_size,
                after=self.ordered_after,
                topic_limit=_topic_limit(limit),
            )
            if not found:
                return []
            self.ordered_after = found[-1].topic_id
            batches = [topic.batch for topic in found if topic.batch is not None]
            ids = {topic.topic_id for topic in found}
            if batches or ids & seen or len(found) < _topic_limit(limit):
                return batches
            seen |= ids

    def reclaim(self, *, without: Collection[str] = (), only: str | None = None) -> Batch | None:
        """Take up the oldest batch that is due, or that its relay left behind."""
        return reclaim(self.connection, self._scope(without, only), lane=self.lane.number, lease=self.lease)

    def _scope(self, without: Collection[str], only: str | None) -> Scope:
        return Scope(self.broker, [*self.foreign, *without], only)


def _topic_limit(limit: int | None) -> int:
    return 1 if limit else TOPICS_PER_CLAIM

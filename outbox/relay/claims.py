"""What one relay claims of one broker: how much at once, and which topics next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

from outbox.batches.batch import Batch
from outbox.batches.claim import TOPICS_PER_CLAIM, Scope, claim, claim_ordered, reclaim
from outbox.batches.claim_topic import NewOfTopic, claim_topic
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


MANY_TOPICS = 200  # to look at each of them costs more than to claim a few hundred messages


@dataclass(slots=True)
class Claims:
    """
    What one relay claims of one broker.

    Args:
        lease: other relays leave a batch alone that long, by the database's clock.
        batch_size: so many messages of a topic at most, and twice as many of all topics together.
        topic_count: the broker's topics. Of many only those are looked at that had tickets in the last look at all of them, as
            long as these go on having some and the next look at all is not due.
        foreign: names of topics that are not this relay's, whatever their rows say.
    """

    connection: Connection
    broker: str
    lane: Lane
    lease: timedelta
    batch_size: int
    topic_count: int = 0
    scan_positions: ScanPositions = field(default_factory=ScanPositions)
    late_looks: ScanPositions = field(init=False)  # when a topic that is told of may be looked at from 0
    after: int = 0  # the last topic looked at
    ordered_after: int = 0
    busy: frozenset[int] = frozenset()  # ids of all topics that had tickets, if they were few of many
    foreign: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.late_looks = ScanPositions(self.scan_positions.clock)

    def claim(self, *, without: Collection[str] = (), limit: int | None = None, only: str | None = None) -> list[Batch]:
        """
        Claim the oldest tickets of the broker's topics without order.

        Args:
            without: names of topics to leave out.
            limit: at most this many messages, of one topic; by default as many as the settings say.
            only: the name of the only topic to look at.
        """
        scope = self._scope(without, only)
        is_due = self.scan_positions.is_due()
        if limit is None and self.busy and not is_due and (batches := self._claim(scope, None, among=self.busy)):
            return batches
        began = self.scan_positions.clock()
        batches = self._claim(scope, limit, from_zero=is_due)
        if is_due and limit is None:
            self.scan_positions.note_from_zero(began)
        return batches

    def _claim(
        self, scope: Scope, limit: int | None, *, from_zero: bool = False, among: frozenset[int] = frozenset()
    ) -> list[Batch]:
        found = claim(
            self.connection,
            scope,
            lane=self.lane.number,
            lease=self.lease,
            limit=limit or self.batch_size,
            after=self.after,
            topic_limit=_topic_limit(limit),
            scan_from={} if from_zero else self.scan_positions.positions,
            among=among,
        )
        if found:
            self.after = found[-1].topic_id
        self.scan_positions.positions |= {topic.topic_id: topic.last_pos for topic in found if topic.last_pos is not None}
        if limit is None and not among:
            are_all = self.topic_count >= MANY_TOPICS and len(found) < TOPICS_PER_CLAIM
            self.busy = frozenset(topic.topic_id for topic in found) if are_all else frozenset()
        return [topic.batch for topic in found if topic.batch is not None]

    def claim_new(self, topic_ids: Collection[int], *, without: Collection[str] = ()) -> list[Batch]:
        """
        Claim the oldest tickets, few of each, of topics that have new messages; of topics without order they come along.

        Where there is nothing behind the last ticket seen, one before it may have been committed late.
        """
        batches = []
        for topic_id in topic_ids:
            scan_from = self.scan_positions.positions.get(topic_id, 0)
            found = self._claim_topic(topic_id, scan_from, without)
            if found.is_empty and scan_from and self.late_looks.is_due():
                began = self.late_looks.clock()
                found = self._claim_topic(topic_id, 0, without)
                self.late_looks.note_from_zero(began)
            if found.batch is not None:
                batches.append(found.batch)
            elif found.topic is not None and found.is_ordered:
                batches += self.claim_ordered(without=without, only=found.topic)
        return batches

    def _claim_topic(self, topic_id: int, scan_from: int, without: Collection[str]) -> NewOfTopic:
        scope = self._scope(without, None)
        found = claim_topic(self.connection, scope, topic_id, lane=self.lane.number, lease=self.lease, scan_from=scan_from)
        if found.last_pos is not None:
            self.scan_positions.positions[topic_id] = found.last_pos
        return found

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

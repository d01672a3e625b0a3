"""
Choose what a relay claims next: from which topics, and how many messages; and give delayed messages their ticket when they are
due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic

import msgspec

from outbox.batches.batch import ClaimedBatch
from outbox.batches.claim import (
    MESSAGES_PER_CLAIM,
    TOPICS_PER_CLAIM,
    Scope,
    claim,
    claim_ordered,
    claim_topic,
    reclaim,
)
from outbox.database import Connection


class FullScanTimer(msgspec.Struct):
    """
    When the next scan for tickets starts at position 0.

    Dead tuples of claimed tickets, which an old snapshot keeps from being vacuumed, come before the live ones, and a scan
    from 0 passes all of them. So a scan starts at the last position seen. A ticket that was committed late may come before
    that position, so a scan starts at 0 once a second, or more often while such scans are fast.
    """

    clock: Callable[[], float] = monotonic
    due_at: float = 0.0

    LONGEST_SECONDS = 1.0
    SHARE = 20  # scans from 0 take at most a twentieth of the time

    def is_due(self) -> bool:
        """Return whether the next scan starts at 0."""
        return self.clock() >= self.due_at

    def note_full_scan(self, began: float) -> None:
        """Schedule the next scan from 0 after one that began at that time of the clock and has just ended."""
        now = self.clock()
        self.due_at = now + min(self.LONGEST_SECONDS, (now - began) * self.SHARE)


MANY_TOPICS = 200  # a scan of all of them costs more than claiming a few hundred messages

# While rounds are full and quick, claims double up to this many times the batch size: each round has a cost of its own.
GROWTH = 4
QUICK_SECONDS = 1.0


@dataclass(slots=True)
class Claims:
    """
    The claims of one relay, for one broker.

    Args:
        lease: how long other relays leave a batch alone, by the database's clock.
        batch_size: the most messages per topic, while claims have not grown; twice as many for all topics together, and at most
            `MESSAGES_PER_CLAIM`.
        in_transactions: whether the batches are sent in transactions of the lane.
        topic_count: how many topics the broker has. From `MANY_TOPICS` on, a claim looks only at the topics that had tickets in
            the last full scan, while they still have some and the next full scan is not due.
        scan_positions: topic id -> the ticket position at which the next scan starts.
        full_scans: when `claim` starts at position 0.
        late_scans: when `claim_new` starts at position 0, after it has found nothing.
        after: id of the last topic looked at.
        busy: ids of the topics that had tickets in the last full scan. Empty: look at all topics.
        foreign: names of topics that are not this relay's, whatever their rows say.
        limit: the most messages per topic in the next claim.
    """

    connection: Connection
    broker: str
    lane: int
    lease: timedelta
    batch_size: int
    topic_count: int = 0
    in_transactions: bool = False
    clock: Callable[[], float] = monotonic
    scan_positions: dict[int, int] = field(default_factory=dict)
    full_scans: FullScanTimer = field(init=False)
    late_scans: FullScanTimer = field(init=False)
    after: int = 0
    ordered_after: int = 0
    busy: frozenset[int] = frozenset()
    foreign: frozenset[str] = frozenset()
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = self.batch_size
        self.full_scans = FullScanTimer(self.clock)
        self.late_scans = FullScanTimer(self.clock)

    def note_round(self, claimed: int, sent: int, seconds: float) -> None:
        """Double the limit after a full round that was quick and sent all of its messages; otherwise reset it."""
        is_worth_more = self.limit <= claimed == sent and seconds < QUICK_SECONDS
        grown = min(2 * self.limit, GROWTH * self.batch_size, MESSAGES_PER_CLAIM)
        self.limit = grown if is_worth_more else self.batch_size

    def claim(self, *, without: Collection[str] = (), limit: int | None = None, only: str | None = None) -> list[ClaimedBatch]:
        """
        Claim the oldest tickets of the broker's unordered topics.

        Args:
            without: names of topics to leave out.
            limit: at most this many messages, of one topic; by default, the limit of the claims.
            only: the name of the only topic to look at.
        """
        scope = self._scope(without, only)
        is_due = self.full_scans.is_due()
        if limit is None and self.busy and not is_due and (batches := self._claim(scope, None, among=self.busy)):
            return batches
        began = self.clock()
        batches = self._claim(scope, limit, is_full_scan=is_due)
        if is_due and limit is None:
            self.full_scans.note_full_scan(began)
        return batches

    def _claim(
        self, scope: Scope, limit: int | None, *, is_full_scan: bool = False, among: frozenset[int] = frozenset()
    ) -> list[ClaimedBatch]:
        claimed = claim(
            self.connection,
            scope,
            lane=self.lane,
            lease=self.lease,
            limit=limit or self.limit,
            after=self.after,
            topic_limit=_topic_limit(limit),
            scan_from={} if is_full_scan else self.scan_positions,
            among=among,
        )
        if claimed:
            self.after = claimed[-1][0]
        self.scan_positions |= {topic_id: last_pos for topic_id, last_pos, _ in claimed if last_pos is not None}
        if limit is None and not among:
            are_few_of_many = self.topic_count >= MANY_TOPICS and len(claimed) < TOPICS_PER_CLAIM
            self.busy = frozenset(topic_id for topic_id, *_ in claimed) if are_few_of_many else frozenset()
        return [batch for *_, batch in claimed if batch is not None]

    def claim_new(self, topic_ids: Collection[int], *, without: Collection[str] = ()) -> list[ClaimedBatch]:
        """
        Claim a few of the oldest tickets of each topic that has new messages; loads the messages of unordered topics, too.

        Where no ticket follows the last one seen, a ticket before it may have been committed late: look again from 0.
        """
        batches = []
        for topic_id in topic_ids:
            scan_from = self.scan_positions.get(topic_id, 0)
            topic, is_ordered, batch = self._claim_topic(topic_id, scan_from, without)
            if topic and not is_ordered and batch is None and scan_from and self.late_scans.is_due():
                began = self.clock()
                topic, is_ordered, batch = self._claim_topic(topic_id, 0, without)
                self.late_scans.note_full_scan(began)
            if batch is not None:
                batches.append(batch)
            elif topic and is_ordered:
                batches += self.claim_ordered(without=without, only=topic)
        return batches

    def _claim_topic(
        self, topic_id: int, scan_from: int, without: Collection[str]
    ) -> tuple[str | None, bool, ClaimedBatch | None]:
        scope = self._scope(without, None)
        topic, is_ordered, last_pos, batch = claim_topic(
            self.connection, scope, topic_id, lane=self.lane, lease=self.lease, scan_from=scan_from
        )
        if last_pos is not None:
            self.scan_positions[topic_id] = last_pos
        return topic, is_ordered, batch

    def claim_ordered(
        self, *, without: Collection[str] = (), limit: int | None = None, only: str | None = None
    ) -> list[ClaimedBatch]:
        """
        Claim the oldest tickets of ordered topics whose keys are free; arguments as for `claim`.

        Topics whose waiting keys are all held yield no batch and must not keep others waiting: the search goes on until it
        meets a topic for the second time. Topics may be added and removed meanwhile.
        """
        seen: set[int] = set()
        while True:
            claimed = claim_ordered(
                self.connection,
                self._scope(without, only),
                lane=self.lane,
                lease=self.lease,
                limit=limit or self.limit,
                after=self.ordered_after,
                topic_limit=_topic_limit(limit),
            )
            if not claimed:
                return []
            self.ordered_after = claimed[-1][0]
            batches = [batch for *_, batch in claimed if batch is not None]
            ids = {topic_id for topic_id, *_ in claimed}
            if batches or ids & seen or len(claimed) < _topic_limit(limit):
                return batches
            seen |= ids

    def reclaim(self, *, without: Collection[str] = (), only: str | None = None, but: int | None = None) -> ClaimedBatch | None:
        """Claim again the batch that has been due longest, or that its relay left behind, except the batch with an id."""
        return reclaim(self.connection, self._scope(without, only), lane=self.lane, lease=self.lease, but=but)

    def _scope(self, without: Collection[str], only: str | None) -> Scope:
        return Scope(self.broker, [*self.foreign, *without], only, self.in_transactions)


def _topic_limit(limit: int | None) -> int:
    return 1 if limit else TOPICS_PER_CLAIM


# The order is that of `due_at`, so that the tickets' positions follow it. clock_timestamp() is in a subquery, because an index
# scan needs a value, not a volatile function.
MOVE_DUE = """
WITH due AS (
    SELECT message_id FROM outbox_delayed WHERE due_at <= (SELECT clock_timestamp())
    ORDER BY due_at LIMIT %s FOR UPDATE SKIP LOCKED
), moved AS (
    DELETE FROM outbox_delayed WHERE message_id = ANY(ARRAY(SELECT message_id FROM due))
    RETURNING message_id, topic_id, order_key, due_at
)
INSERT INTO outbox_ticket (message_id, topic_id, order_key)
SELECT message_id, topic_id, order_key FROM moved ORDER BY due_at, message_id
"""


MOVE_LIMIT = 1000  # rows in one statement


def move_due(connection: Connection) -> int:
    """Turn at most `MOVE_LIMIT` delayed rows that are due into tickets; return how many."""
    return connection.execute(MOVE_DUE, [MOVE_LIMIT]).rowcount

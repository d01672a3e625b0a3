"""
Choose what a relay claims next: from which topics, and how many messages. Also give delayed messages a ticket when they are due.

A ticket is the row of a waiting message. Claims read the tickets of a topic in the order of their positions.
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
    Decides when a scan for tickets starts at position 0.

    A scan from 0 reads all dead tuples of claimed tickets, which an old snapshot may keep from being vacuumed. So a scan usually
    starts at the last claimed position. But a ticket with a lower position may have been committed later. So at least once a
    second, and more often while such scans are fast, a scan starts at 0.
    """

    clock: Callable[[], float] = monotonic
    due_at: float = 0.0

    MAX_INTERVAL_SECONDS = 1.0
    INTERVAL_FACTOR = 20  # the interval is this many times the scan's duration, so that scans from 0 take a twentieth of the time

    def is_due(self) -> bool:
        """Return whether the next scan starts at 0."""
        return self.clock() >= self.due_at

    def schedule_next(self, began: float) -> None:
        """Schedule the next scan from 0, after one has just ended. `began`: the time of the clock when that one began."""
        now = self.clock()
        self.due_at = now + min(self.MAX_INTERVAL_SECONDS, (now - began) * self.INTERVAL_FACTOR)


MANY_TOPICS = 200  # scanning the tickets of this many topics costs more than claiming a few hundred messages

# While rounds are full and quick, the limit of a claim doubles, up to GROWTH times the batch size: each round has a fixed cost.
GROWTH = 4
QUICK_SECONDS = 1.0


@dataclass(slots=True)
class Claims:
    """
    The claims of one relay, for one broker.

    Args:
        lease: how long other relays leave a batch alone, by the database's clock.
        batch_size: the initial `limit`.
        in_transactions: whether the batches are sent in transactions of the lane.
        topic_count: how many topics the broker has. From `MANY_TOPICS` on, a claim considers only the topics that had tickets in
            the last full scan, as long as they still have some and the next full scan is not due.
        scan_positions: topic id -> the ticket position at which the next scan starts.
        full_scans: decides when `claim` starts at position 0.
        late_scans: decides when `claim_new` starts again at position 0, after it has found no ticket behind the last claimed one.
        after: id of the last topic that a claim has considered, after which the next claim begins.
        ordered_after: the same for ordered topics.
        busy: ids of the topics that had tickets in the last full scan; empty if the next claim has to consider all topics.
        foreign: names of topics that the settings do not assign to this broker, even if their rows do.
        limit: maximum number of messages per topic in the next claim. All topics together get at most twice as many, and at most
            `MESSAGES_PER_CLAIM`.
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

    def adapt_limit(self, claimed: int, sent: int, seconds: float) -> None:
        """Double the limit after a full round that was quick and sent all of its messages; otherwise reset it."""
        is_worth_more = self.limit <= claimed == sent and seconds < QUICK_SECONDS
        grown = min(2 * self.limit, GROWTH * self.batch_size, MESSAGES_PER_CLAIM)
        self.limit = grown if is_worth_more else self.batch_size

    def claim(self, *, without: Collection[str] = (), limit: int | None = None, only: str | None = None) -> list[ClaimedBatch]:
        """
        Claim the oldest tickets of the broker's unordered topics.

        Args:
            without: names of topics to exclude.
            limit: claim at most this many messages, of one topic. By default, `self.limit` messages of each topic.
            only: the name of the only topic to consider.
        """
        scope = self._scope(without, only)
        is_due = self.full_scans.is_due()
        if limit is None and self.busy and not is_due and (batches := self._claim(scope, None, among=self.busy)):
            return batches
        began = self.clock()
        batches = self._claim(scope, limit, is_full_scan=is_due)
        if is_due and limit is None:
            self.full_scans.schedule_next(began)
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
        Claim a few of the oldest tickets of each topic that has new messages; also load the messages of unordered topics.

        If no ticket follows the last claimed position, a ticket with a lower position may have been committed late, so the topic
        is scanned again from 0.
        """
        batches = []
        for topic_id in topic_ids:
            scan_from = self.scan_positions.get(topic_id, 0)
            topic, is_ordered, batch = self._claim_topic(topic_id, scan_from, without)
            if topic and not is_ordered and batch is None and scan_from and self.late_scans.is_due():
                began = self.clock()
                topic, is_ordered, batch = self._claim_topic(topic_id, 0, without)
                self.late_scans.schedule_next(began)
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

        A key is not free while an unfinished or dead batch has a message of it. If no key of the considered topics is free, go on
        to the next topics, so that these are not kept waiting. Stop after the last topic, or when one comes up a second time.
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
        """Claim again a batch whose relay died, or the released one that has been due longest. `but`: a batch's id to exclude."""
        return reclaim(self.connection, self._scope(without, only), lane=self.lane, lease=self.lease, but=but)

    def _scope(self, without: Collection[str], only: str | None) -> Scope:
        return Scope(self.broker, [*self.foreign, *without], only, self.in_transactions)


def _topic_limit(limit: int | None) -> int:
    return 1 if limit else TOPICS_PER_CLAIM


# Replace delayed rows that are due by tickets, in the order of `due_at`, since messages are sent in the order of their tickets.
# clock_timestamp() is in a subquery, because it is volatile, and an index scan needs a value.
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
    """Turn at most `MOVE_LIMIT` delayed rows that are due into tickets; return their number."""
    return connection.execute(MOVE_DUE, [MOVE_LIMIT]).rowcount

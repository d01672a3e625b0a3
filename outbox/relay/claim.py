"""
Claims: tickets become batches, and batches that wait or were left behind are taken up again.

A claim gives the batches' shape only; `rows.py` loads what the messages say, in slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any

from outbox.batches.batch import Batch
from outbox.database import Connection
from outbox.message import TopicType
from outbox.relay.lane import LOCK_SPACE, Lane

TOPICS_PER_CLAIM = 16

# The tickets of up to 16 topics become one batch per topic, numbered in the lane; one row for each topic looked at.
# The LATERAL probe touches one ticket per topic; EXISTS would join over all of them.
CLAIM_PARTS = (
    """
WITH w AS (
    SELECT t.id, t.name, t.type, coalesce(f.pos, 0) AS pos
    FROM outbox_topic t LEFT JOIN unnest(%(topics)s::int[], %(floors)s::bigint[]) f(topic_id, pos) ON f.topic_id = t.id,
    LATERAL (SELECT 1 FROM outbox_ticket WHERE topic_id = t.id AND pos >= coalesce(f.pos, 0) ORDER BY pos LIMIT 1) x
    WHERE NOT t.paused AND t.broker = %(broker)s AND t.ordered = %(ordered)s
    ORDER BY t.id <= %(after)s, t.id LIMIT %(topic_limit)s),
p AS (
    SELECT k.c FROM w, LATERAL (
        SELECT ctid AS c FROM outbox_ticket WHERE topic_id = w.id AND pos >= w.pos""",
    """
        ORDER BY pos LIMIT %(limit)s FOR UPDATE SKIP LOCKED) k),
t AS (
    DELETE FROM outbox_ticket WHERE ctid = ANY(ARRAY(SELECT c FROM p)) RETURNING topic_id, pos, message_id, order_key),
a AS (
    SELECT topic_id, array_agg(message_id ORDER BY pos) AS ids, count(*) AS n, max(pos) AS last_pos,""",
    """ AS order_keys
    FROM t GROUP BY topic_id),
k AS (
    INSERT INTO outbox_lane AS l (topic_id, lane, last_seq) SELECT topic_id, %(lane)s, n FROM a ORDER BY topic_id
    ON CONFLICT (topic_id, lane) DO UPDATE SET last_seq = l.last_seq + excluded.last_seq
    RETURNING l.topic_id, l.last_seq),
b AS (
    INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, order_keys, owner, lease_until)
    SELECT a.topic_id, %(lane)s, k.last_seq - a.n + 1, a.ids, a.order_keys, %(lane)s, clock_timestamp() + %(lease)s
    FROM a JOIN k USING (topic_id)
    RETURNING id, attempt, topic_id, lane, first_seq, message_ids, order_keys)
SELECT w.id, a.last_pos, b.id, b.attempt, w.name, w.type, b.lane, b.first_seq, b.message_ids::text[], b.order_keys,
       '{}'::smallint[], 0
FROM w LEFT JOIN b ON b.topic_id = w.id LEFT JOIN a ON a.topic_id = w.id
ORDER BY w.id <= %(after)s, w.id
""",
)

# A key that has a message in an unfinished or dead batch waits for it. One NULL in a NOT IN claims nothing for ever;
# publish() gives each message of an ordered topic a key.
KEY_IS_FREE = """
        AND order_key NOT IN (
            SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state IN (0, 1, 2) AND key IS NOT NULL
            UNION ALL
            SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state = 4 AND key IS NOT NULL)"""

CLAIM = CLAIM_PARTS[0] + CLAIM_PARTS[1] + " NULL::bigint[]" + CLAIM_PARTS[2]

CLAIM_ORDERED = CLAIM_PARTS[0] + KEY_IS_FREE + CLAIM_PARTS[1] + " array_agg(order_key ORDER BY pos)" + CLAIM_PARTS[2]

# Claims of ordered topics come one after the other. A statement of its own: the snapshot of the claim that follows
# is then newer than the commit of the claim before.
LOCK_ORDER = "SELECT pg_advisory_xact_lock(7708, 0)"

# Does a ticket wait in an ordered topic? Spares the lock where there is none.
ORDERED_WAITS = """
SELECT 1 FROM outbox_topic t, LATERAL (SELECT 1 FROM outbox_ticket WHERE topic_id = t.id ORDER BY pos LIMIT 1) x
WHERE t.ordered AND NOT t.paused AND t.broker = %s LIMIT 1
"""

# The oldest batch that is due, or whose lease is over, or whose owner's lane nobody holds any more: attempt + 1. One
# with order keys waits for all unfinished and dead batches before it that share a key. Before it is by number, not by id: a
# batch split off late holds earlier messages. Batches that share a key were one once, so their numbers are of one lane.
RECLAIM = """
WITH b AS (
    UPDATE outbox_batch SET state = 1, attempt = attempt + 1, owner = %(lane)s, due_at = NULL,
        lease_until = clock_timestamp() + %(lease)s, claimed_at = clock_timestamp()
    WHERE id = (
        SELECT b.id FROM outbox_batch b JOIN outbox_topic o ON o.id = b.topic_id AND NOT o.paused AND o.broker = %(broker)s
        WHERE b.state IN (0, 1, 2)
        AND (b.state = 0 AND b.due_at <= clock_timestamp()
            OR b.state = 1 AND (b.lease_until < clock_timestamp() OR NOT EXISTS (
                SELECT 1 FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted
                AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                AND l.classid = %(lock_space)s AND l.objid = b.owner)))
        AND (b.order_keys IS NULL OR NOT EXISTS (
            SELECT 1 FROM outbox_batch e
            WHERE (e.state IN (0, 1, 2) OR e.state = 4) AND e.topic_id = b.topic_id AND e.first_seq < b.first_seq
            AND e.order_keys && b.order_keys))
        ORDER BY b.id LIMIT 1 FOR UPDATE OF b SKIP LOCKED)
    RETURNING *)
SELECT b.id, b.attempt, o.name, o.type, b.lane, b.first_seq, b.message_ids::text[], b.order_keys, b.split, b.tries
FROM b JOIN outbox_topic o ON o.id = b.topic_id
"""


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
    """

    connection: Connection
    broker: str
    lane: Lane
    lease: timedelta
    batch_size: int
    floors: ScanPositions = field(default_factory=ScanPositions)
    after: int = 0  # the last topic looked at
    topics_served: int = 0
    ordered_after: int = 0

    def claim(self, *, limit: int | None = None) -> list[Batch]:
        """
        Turn the oldest tickets of the broker's topics without order into batches, one per topic.

        Args:
            limit: at most this many messages of one topic only; by default as many as the settings say.
        """
        began = self.floors.clock()
        floors = {} if self.floors.is_due() else self.floors.positions
        rows = self.connection.execute(CLAIM, self._arguments(floors, limit, ordered=False)).fetchall()
        if rows:
            self.after = rows[-1][0]
        served = [row for row in rows if row[2] is not None]
        self.topics_served = len(served)
        self.floors.positions |= {row[0]: row[1] for row in served}
        if not floors:
            self.floors.note_from_zero(began)
        return [_batch(row[2:]) for row in served]

    def claim_ordered(self, *, limit: int | None = None) -> list[Batch]:
        """Turn the oldest tickets of ordered topics whose keys are free into batches, one per topic."""
        first = self.ordered_after
        while self.connection.execute(ORDERED_WAITS, [self.broker]).fetchone():
            with self.connection.transaction():
                self.connection.execute(LOCK_ORDER)
                rows = self.connection.execute(CLAIM_ORDERED, self._arguments({}, limit, ordered=True)).fetchall()
            # Topics whose waiting keys are all held give nothing; the next ones shall not wait behind them.
            has_wrapped = len(rows) < TOPICS_PER_CLAIM or any(row[0] == first for row in rows)
            if rows:
                self.ordered_after = rows[-1][0]
            served = [_batch(row[2:]) for row in rows if row[2] is not None]
            if served or has_wrapped:
                return served
            first = first or rows[0][0]
        return []

    def reclaim(self) -> Batch | None:
        """Take up the oldest batch that is due, or that its relay left behind."""
        arguments = {
            "lane": self.lane.number,
            "lease": self.lease,
            "broker": self.broker,
            "lock_space": LOCK_SPACE,
        }
        row = self.connection.execute(RECLAIM, arguments).fetchone()
        return None if row is None else _batch(row)

    def _arguments(self, floors: dict[int, int], limit: int | None, *, ordered: bool) -> dict[str, Any]:
        return {
            "topics": list(floors),
            "floors": list(floors.values()),
            "broker": self.broker,
            "ordered": ordered,
            "after": self.ordered_after if ordered else self.after,
            "topic_limit": 1 if limit else TOPICS_PER_CLAIM,
            "limit": limit or max(1, 2 * self.batch_size // max(2, self.topics_served)),
            "lane": self.lane.number,
            "lease": self.lease,
        }


def _batch(row: tuple[Any, ...]) -> Batch:
    batch_id, attempt, topic, kind, lane, first_seq, message_ids, order_keys, split, tries = row
    return Batch(batch_id, attempt, topic, TopicType(kind), lane, first_seq, message_ids, order_keys, frozenset(split), tries)

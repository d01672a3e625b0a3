"""
Claim and re-claim: tickets become batches, and batches that wait or were left behind are taken up again.

Both return the batches' shape only; `relay/load.py` loads what the messages say, in slices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from outbox.batches.batch import UNFINISHED, Batch
from outbox.database import Connection
from outbox.database.locks import IS_LANE_FREE, Lock
from outbox.message import TopicType
from outbox.models import State

TOPICS_PER_CLAIM = 16

# The oldest tickets of each topic, but for those that somebody else has locked.
OLDEST = """
p AS (
    SELECT k.c FROM w, LATERAL (
        SELECT ctid AS c FROM outbox_ticket WHERE topic_id = w.id AND pos >= w.pos
        ORDER BY pos LIMIT (SELECT per_topic FROM n) FOR UPDATE SKIP LOCKED) k)"""

# The oldest tickets of each topic whose keys are free. A key that has a message in an unfinished or dead batch waits for it,
# and so does one whose earlier ticket somebody else has locked. A ticket without a key is from before the topic was ordered;
# one NULL on the right of a NOT IN would claim nothing for ever.
OLDEST_OF_FREE_KEYS = f"""
s AS (
    SELECT w.id AS topic_id, k.* FROM w, LATERAL (
        SELECT ctid AS c, pos, order_key FROM outbox_ticket WHERE topic_id = w.id AND pos >= w.pos
        AND (order_key IS NULL OR order_key NOT IN (
            SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state IN {UNFINISHED} AND key IS NOT NULL
            UNION ALL
            SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state = {State.DEAD} AND key IS NOT NULL))
        ORDER BY pos LIMIT (SELECT per_topic FROM n)) k),
l AS (SELECT ctid AS c FROM outbox_ticket WHERE ctid = ANY(ARRAY(SELECT c FROM s)) FOR UPDATE SKIP LOCKED),
p AS (
    SELECT c FROM (
        SELECT s.c, l.c IS NOT NULL AS is_mine, s.pos,
            min(s.pos) FILTER (WHERE l.c IS NULL) OVER (PARTITION BY s.topic_id, s.order_key) AS not_mine
        FROM s LEFT JOIN l ON l.c = s.c) f
    WHERE is_mine AND (not_mine IS NULL OR pos < not_mine))"""


def _claim_statement(*, tickets: str, order_keys: str, among: str = "") -> str:
    """
    Return the claim: the tickets of up to 16 topics become one batch per topic, numbered in the lane.

    It returns one row for each topic looked at. The LATERAL probe touches one ticket per topic; EXISTS would join over all of
    them. `limit` is shared out among the topics, so that the answer fits into a socket's buffer: a relay that is frozen before
    it reads would hold the locks of a statement that cannot end.
    """
    return f"""
WITH w AS (
    SELECT t.id, t.name, t.type, f.pos
    FROM outbox_topic t,
    LATERAL (SELECT coalesce((%(scan_from)s::jsonb ->> t.id::text)::bigint, 0) AS pos) f,
    LATERAL (SELECT 1 FROM outbox_ticket WHERE topic_id = t.id AND pos >= f.pos ORDER BY pos LIMIT 1) x
    WHERE NOT t.paused AND t.broker = %(broker)s AND t.ordered = %(ordered)s AND t.name <> ALL(%(without)s::text[])
    AND (%(only)s::text IS NULL OR t.name = %(only)s) {among}
    ORDER BY t.id <= %(after)s, t.id LIMIT %(topic_limit)s),
n AS (SELECT least(%(limit)s, greatest(1, 2 * %(limit)s / greatest(1, count(*)))) AS per_topic FROM w),{tickets},
t AS (
    DELETE FROM outbox_ticket WHERE ctid = ANY(ARRAY(SELECT c FROM p)) RETURNING topic_id, pos, message_id, order_key),
a AS (
    SELECT topic_id, array_agg(message_id ORDER BY pos) AS ids, count(*) AS n, max(pos) AS last_pos, {order_keys} AS order_keys
    FROM t GROUP BY topic_id),
k AS (
    INSERT INTO outbox_lane AS l (topic_id, lane, last_seq) SELECT topic_id, %(lane)s, n FROM a ORDER BY topic_id
    ON CONFLICT (topic_id, lane) DO UPDATE SET last_seq = l.last_seq + excluded.last_seq
    RETURNING l.topic_id, l.last_seq),
b AS (
    INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, order_keys, state, owner, lease_until)
    SELECT a.topic_id, %(lane)s, k.last_seq - a.n + 1, a.ids, a.order_keys, {State.CLAIMED}, %(lane)s,
        clock_timestamp() + %(lease)s
    FROM a JOIN k USING (topic_id)
    RETURNING id, attempt, topic_id, lane, first_seq, message_ids, order_keys)
SELECT w.id, a.last_pos, b.id, b.attempt, w.name, w.type, b.lane, b.first_seq, b.message_ids::text[], b.order_keys,
       '{{}}'::smallint[], 0
FROM w LEFT JOIN b ON b.topic_id = w.id LEFT JOIN a ON a.topic_id = w.id
ORDER BY w.id <= %(after)s, w.id
"""


CLAIM = _claim_statement(tickets=OLDEST, order_keys="NULL::bigint[]")

# Of these topics only: each probe costs a microsecond, which thousands of topics feel.
CLAIM_AMONG = _claim_statement(tickets=OLDEST, order_keys="NULL::bigint[]", among="AND t.id = ANY(%(among)s)")

CLAIM_ORDERED = _claim_statement(tickets=OLDEST_OF_FREE_KEYS, order_keys="array_agg(order_key ORDER BY pos)")

# Claims of ordered topics come one after the other. A statement of its own: the snapshot of the claim that follows
# is then newer than the commit of the claim before.
LOCK_ORDER = f"SELECT pg_advisory_xact_lock({Lock.ORDERED_CLAIM}, 0)"

# Does a ticket wait in an ordered topic? Spares the lock where there is none.
ORDERED_WAITS = """
SELECT 1 FROM outbox_topic t, LATERAL (SELECT 1 FROM outbox_ticket WHERE topic_id = t.id ORDER BY pos LIMIT 1) x
WHERE t.ordered AND NOT t.paused AND t.broker = %(broker)s AND t.name <> ALL(%(without)s::text[])
AND (%(only)s::text IS NULL OR t.name = %(only)s) LIMIT 1
"""

# The oldest batch that is due, or whose lease is over, or whose owner's lane nobody holds any more: attempt + 1. One
# with order keys waits for all unfinished and dead batches before it that share a key. Before it is by number, not by id: a
# batch split off late holds earlier messages. Batches that share a key were one once, so their numbers are of one lane.
RECLAIM = f"""
WITH b AS (
    UPDATE outbox_batch SET state = {State.CLAIMED}, attempt = attempt + 1, owner = %(lane)s, due_at = NULL,
        lease_until = clock_timestamp() + %(lease)s, claimed_at = clock_timestamp()
    WHERE id = (
        SELECT b.id FROM outbox_batch b JOIN outbox_topic o ON o.id = b.topic_id AND NOT o.paused AND o.broker = %(broker)s
            AND o.name <> ALL(%(without)s::text[]) AND (%(only)s::text IS NULL OR o.name = %(only)s)
        WHERE b.state IN {UNFINISHED}
        AND (b.state = {State.RELEASED} AND b.due_at <= clock_timestamp()
            OR b.state = {State.CLAIMED} AND (b.lease_until < clock_timestamp() OR {IS_LANE_FREE.format(lane="b.owner")}))
        AND (b.order_keys IS NULL OR NOT EXISTS (
            SELECT 1 FROM outbox_batch e
            WHERE (e.state IN {UNFINISHED} OR e.state = {State.DEAD}) AND e.topic_id = b.topic_id AND e.first_seq < b.first_seq
            AND e.order_keys && b.order_keys))
        ORDER BY b.id LIMIT 1 FOR UPDATE OF b SKIP LOCKED)
    RETURNING *)
SELECT b.id, b.attempt, o.name, o.type, b.lane, b.first_seq, b.message_ids::text[], b.order_keys, b.split, b.tries
FROM b JOIN outbox_topic o ON o.id = b.topic_id
"""


@dataclass(frozen=True, slots=True)
class Scope:
    """
    Which topics a claim looks at: those that their rows give to a broker.

    Args:
        without: names of topics to leave out.
        only: the name of the only topic to look at. None: all of them.
    """

    broker: str
    without: Collection[str] = ()
    only: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return it as arguments of the statements."""
        return {"broker": self.broker, "without": list(self.without), "only": self.only}


@dataclass(frozen=True, slots=True)
class ClaimedTopic:
    """
    A topic that a claim has looked at.

    Args:
        last_pos: position of the last ticket that the claim took.
        batch: None where no ticket could be taken: all are locked, or their keys are held.
    """

    topic_id: int
    last_pos: int | None
    batch: Batch | None


def claim(
    connection: Connection,
    scope: Scope,
    *,
    lane: int,
    lease: timedelta,
    limit: int,
    after: int = 0,
    topic_limit: int = TOPICS_PER_CLAIM,
    scan_from: Mapping[int, int] | None = None,
    among: Collection[int] = (),
) -> list[ClaimedTopic]:
    """
    Turn the oldest tickets of topics without order into batches, one per topic.

    Args:
        lane: the lane this relay holds; its next numbers go to the messages.
        lease: other relays leave the batches alone that long, by the database's clock.
        limit: at most this many messages per topic, and twice as many of all topics together.
        after: id of the topic behind which to begin; the look goes round.
        topic_limit: at most this many topics.
        scan_from: topic id -> the ticket position to begin at.
        among: ids of the only topics to look at. None of them: all.

    Returns:
        The topics looked at, in the order of the look.
    """
    arguments = {"scan_from": Jsonb(scan_from or {}), "ordered": False, **scope.arguments()}
    arguments |= {"lane": lane, "lease": lease, "limit": limit, "after": after, "topic_limit": topic_limit}
    statement, arguments = (CLAIM_AMONG, arguments | {"among": list(among)}) if among else (CLAIM, arguments)
    return [_claimed(row) for row in connection.execute(statement, arguments).fetchall()]


def claim_ordered(
    connection: Connection,
    scope: Scope,
    *,
    lane: int,
    lease: timedelta,
    limit: int,
    after: int = 0,
    topic_limit: int = TOPICS_PER_CLAIM,
) -> list[ClaimedTopic] | None:
    """
    Turn the oldest tickets of ordered topics whose keys are free into batches, one per topic; arguments as for `claim`.

    Returns:
        The topics looked at, in the order of the look. None: no ticket waits in an ordered topic.
    """
    if not connection.execute(ORDERED_WAITS, scope.arguments()).fetchone():
        return None
    arguments = {"scan_from": Jsonb({}), "ordered": True, "lane": lane, "lease": lease, **scope.arguments()}
    arguments |= {"limit": limit, "after": after, "topic_limit": topic_limit}
    # One message to the server, which it takes as one transaction: a relay can be frozen before the server begins, or when it
    # is done. Frozen between two statements, it would keep the lock and stop every other relay.
    with psycopg.ClientCursor(connection) as cursor:
        cursor.execute(f"{LOCK_ORDER};{CLAIM_ORDERED}", arguments)
        cursor.nextset()
        return [_claimed(row) for row in cursor.fetchall()]


def reclaim(connection: Connection, scope: Scope, *, lane: int, lease: timedelta) -> Batch | None:
    """Take up the oldest batch that is due, or that its relay left behind; attempt + 1."""
    row = connection.execute(RECLAIM, {"lane": lane, "lease": lease, **scope.arguments()}).fetchone()
    return None if row is None else _batch(row)


def _claimed(row: tuple[Any, ...]) -> ClaimedTopic:
    return ClaimedTopic(row[0], row[1], None if row[2] is None else _batch(row[2:]))


def _batch(row: tuple[Any, ...]) -> Batch:
    batch_id, attempt, topic, kind, lane, first_seq, message_ids, order_keys, split, tries = row
    return Batch(batch_id, attempt, topic, TopicType(kind), lane, first_seq, message_ids, order_keys, frozenset(split), tries)

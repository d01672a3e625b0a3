"""
Claim and reclaim: tickets become batches, and batches that wait or were left behind are claimed again.

The messages of the batches are loaded later, in slices, by `relay/send.py`; those of few new messages of one topic come with
their claim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from outbox.batches.batch import ClaimedBatch, Transaction
from outbox.database import Connection
from outbox.database.locks import IS_LANE_FREE, Lock
from outbox.message import TopicType
from outbox.models import UNFINISHED, State

TOPICS_PER_CLAIM = 16
MESSAGES_PER_CLAIM = 2000

# The oldest tickets of each topic, except those that another transaction has locked.
OLDEST = """
picked AS (
    SELECT ticket.ctid FROM looked_at, LATERAL (
        SELECT ctid FROM outbox_ticket WHERE topic_id = looked_at.id AND pos >= looked_at.scan_from
        ORDER BY pos LIMIT (SELECT per_topic FROM share) FOR UPDATE SKIP LOCKED) ticket)"""

# The oldest tickets of each topic whose keys are free. A key that has a message in an unfinished or dead batch waits for that
# batch, and for an earlier ticket of the key that another transaction has locked. A ticket without a key was written before the
# topic was ordered. NULL keys are left out: with one NULL in its list, NOT IN is never true.
OLDEST_OF_FREE_KEYS = f"""
candidate AS (
    SELECT looked_at.id AS topic_id, ticket.* FROM looked_at, LATERAL (
        SELECT ctid AS row_id, pos, order_key FROM outbox_ticket WHERE topic_id = looked_at.id AND pos >= looked_at.scan_from
        AND (order_key IS NULL OR order_key NOT IN (
            SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state IN {UNFINISHED} AND key IS NOT NULL
            UNION ALL
            SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state = {State.DEAD} AND key IS NOT NULL))
        ORDER BY pos LIMIT (SELECT per_topic FROM share)) ticket),
locked AS (
    SELECT ctid AS row_id FROM outbox_ticket WHERE ctid = ANY(ARRAY(SELECT row_id FROM candidate)) FOR UPDATE SKIP LOCKED),
picked AS (
    SELECT row_id AS ctid FROM (
        SELECT candidate.row_id, locked.row_id IS NOT NULL AS is_mine, candidate.pos,
            min(candidate.pos) FILTER (WHERE locked.row_id IS NULL)
                OVER (PARTITION BY candidate.topic_id, candidate.order_key) AS not_mine
        FROM candidate LEFT JOIN locked ON locked.row_id = candidate.row_id) marked
    WHERE is_mine AND (not_mine IS NULL OR pos < not_mine))"""


# The transaction of a new batch, where its relay sends in transactions.
TRANSACTION = "CASE WHEN %(in_transactions)s THEN %(lane)s END, CASE WHEN %(in_transactions)s THEN 1 END"


def _claim_statement(*, tickets: str, order_keys: str, among: str = "") -> str:
    """
    Return the SQL of a claim: the tickets of up to 16 topics become one batch per topic, numbered in the lane.

    It returns one row for each topic looked at. The LATERAL probe reads one ticket per topic; EXISTS would join all of them.
    The topics share `limit`, and at most 2,000 messages, so that the result fits into a socket's buffer (212 KB, and with keys
    3,400 messages did): if a relay froze before reading a larger one, the statement could not end and would keep its locks.
    """
    return f"""
WITH looked_at AS (
    SELECT topic.id, topic.name, topic.type, start.scan_from
    FROM outbox_topic topic,
    LATERAL (SELECT coalesce((%(scan_from)s::jsonb ->> topic.id::text)::bigint, 0) AS scan_from) start,
    LATERAL (SELECT 1 FROM outbox_ticket WHERE topic_id = topic.id AND pos >= start.scan_from ORDER BY pos LIMIT 1) probe
    WHERE NOT topic.paused AND topic.broker = %(broker)s AND topic.ordered = %(ordered)s
    AND topic.name <> ALL(%(without)s::text[]) AND (%(only)s::text IS NULL OR topic.name = %(only)s) {among}
    ORDER BY topic.id <= %(after)s, topic.id LIMIT %(topic_limit)s),
share AS (
    SELECT least(%(limit)s, greatest(1, least(2 * %(limit)s, {MESSAGES_PER_CLAIM}) / greatest(1, count(*)))) AS per_topic
    FROM looked_at),{tickets},
taken AS (
    DELETE FROM outbox_ticket WHERE ctid = ANY(ARRAY(SELECT ctid FROM picked))
    RETURNING topic_id, pos, message_id, order_key),
grouped AS (
    SELECT topic_id, array_agg(message_id ORDER BY pos) AS ids, count(*) AS size, max(pos) AS last_pos,
        {order_keys} AS order_keys
    FROM taken GROUP BY topic_id),
numbered AS (
    INSERT INTO outbox_lane AS lane (topic_id, lane, last_seq) SELECT topic_id, %(lane)s, size FROM grouped ORDER BY topic_id
    ON CONFLICT (topic_id, lane) DO UPDATE SET last_seq = lane.last_seq + excluded.last_seq
    RETURNING lane.topic_id, lane.last_seq),
batch AS (
    INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, order_keys, state, owner, lease_until, tx_lane, tx_attempt)
    SELECT grouped.topic_id, %(lane)s, numbered.last_seq - grouped.size + 1, grouped.ids, grouped.order_keys, {State.CLAIMED},
        %(lane)s, clock_timestamp() + %(lease)s, {TRANSACTION}
    FROM grouped JOIN numbered USING (topic_id)
    RETURNING id, attempt, topic_id, lane, first_seq, message_ids, order_keys, tx_lane, tx_attempt)
SELECT looked_at.id, grouped.last_pos, batch.id, batch.attempt, looked_at.name, looked_at.type, batch.lane, batch.first_seq,
    batch.message_ids::text[], batch.order_keys, '{{}}'::smallint[], 0, batch.tx_lane, batch.tx_attempt
FROM looked_at LEFT JOIN batch ON batch.topic_id = looked_at.id LEFT JOIN grouped ON grouped.topic_id = looked_at.id
ORDER BY looked_at.id <= %(after)s, looked_at.id
"""


CLAIM = _claim_statement(tickets=OLDEST, order_keys="NULL::bigint[]")

# Only these topics are probed: each probe costs a microsecond, which adds up over thousands of topics.
CLAIM_AMONG = _claim_statement(tickets=OLDEST, order_keys="NULL::bigint[]", among="AND topic.id = ANY(%(among)s)")

CLAIM_ORDERED = _claim_statement(tickets=OLDEST_OF_FREE_KEYS, order_keys="array_agg(order_key ORDER BY pos)")

# Claims of ordered topics run one after the other. The lock is a statement of its own, so that the snapshot of the claim that
# follows is newer than the commit of the previous claim.
LOCK_ORDER = f"SELECT pg_advisory_xact_lock({Lock.ORDERED_CLAIM}, 0)"

# Whether a ticket waits in an ordered topic. Where there is none, no lock is taken.
ORDERED_WAITS = """
SELECT 1 FROM outbox_topic topic,
LATERAL (SELECT 1 FROM outbox_ticket WHERE topic_id = topic.id ORDER BY pos LIMIT 1) probe
WHERE topic.ordered AND NOT topic.paused AND topic.broker = %(broker)s AND topic.name <> ALL(%(without)s::text[])
AND (%(only)s::text IS NULL OR topic.name = %(only)s) LIMIT 1
"""

# The batch that has been due longest, or whose lease is over, or whose owner's lane is free: attempt + 1. A batch that was just
# returned goes behind the others, so that one that is never answered does not hold them. A batch with order keys waits
# for all unfinished and dead batches before it that share a key. Of messages that were claimed together the lower number comes
# first; otherwise the earlier claim, since claims of ordered topics run one after the other. Numbers of two claims may be of two
# lanes, and the id of a batch that was split off only says when it was.
RECLAIM = f"""
WITH reclaimed AS (
    UPDATE outbox_batch SET state = {State.CLAIMED}, attempt = attempt + 1, owner = %(lane)s, due_at = NULL,
        tx_lane = CASE WHEN %(in_transactions)s THEN tx_lane END, tx_attempt = CASE WHEN %(in_transactions)s THEN tx_attempt END,
        lease_until = clock_timestamp() + %(lease)s, claimed_at = clock_timestamp()
    WHERE id = (
        SELECT batch.id FROM outbox_batch batch
        JOIN outbox_topic topic ON topic.id = batch.topic_id AND NOT topic.paused AND topic.broker = %(broker)s
            AND topic.name <> ALL(%(without)s::text[]) AND (%(only)s::text IS NULL OR topic.name = %(only)s)
        WHERE batch.state IN {UNFINISHED} AND batch.id IS DISTINCT FROM %(but)s
        AND (batch.state = {State.RELEASED} AND batch.due_at <= clock_timestamp()
            OR batch.state = {State.CLAIMED}
                AND (batch.lease_until < clock_timestamp() OR {IS_LANE_FREE.format(lane="batch.owner")}))
        AND (batch.order_keys IS NULL OR NOT EXISTS (
            SELECT 1 FROM outbox_batch earlier
            WHERE (earlier.state IN {UNFINISHED} OR earlier.state = {State.DEAD}) AND earlier.topic_id = batch.topic_id
            AND earlier.order_keys && batch.order_keys
            AND (coalesce(earlier.origin_id, earlier.id), earlier.first_seq)
                < (coalesce(batch.origin_id, batch.id), batch.first_seq)))
        ORDER BY batch.due_at NULLS FIRST, batch.id LIMIT 1 FOR UPDATE OF batch SKIP LOCKED)
    RETURNING *)
SELECT reclaimed.id, attempt, topic.name, topic.type, lane, first_seq, message_ids::text[], order_keys, split, failures,
    tx_lane, tx_attempt
FROM reclaimed JOIN outbox_topic topic ON topic.id = reclaimed.topic_id
"""


class Scope(msgspec.Struct, frozen=True):
    """
    Which topics a claim looks at: those of a broker, as their rows say.

    Args:
        broker: its alias.
        without: names of topics to leave out.
        only: the name of the only topic to look at. None: all of them.
        in_transactions: whether their batches are sent in transactions of the lane.
    """

    broker: str
    without: Collection[str] = ()
    only: str | None = None
    in_transactions: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the parameters of the statements."""
        return {"broker": self.broker, "without": list(self.without), "only": self.only, "in_transactions": self.in_transactions}


ClaimedTopic = tuple[int, int | None, ClaimedBatch | None]
"""
The id of a topic that a claim has looked at, the position of its last ticket that was claimed, and the batch.

The last two are None where no ticket could be claimed: all are locked, or their keys are held.
"""


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
    Turn the oldest tickets of unordered topics into batches, one per topic.

    Args:
        lane: the lane that this relay holds; its next numbers go to the messages.
        lease: how long other relays leave the batches alone, by the database's clock.
        limit: the most messages per topic; twice as many for all topics together, and at most `MESSAGES_PER_CLAIM`.
        after: id of the topic after which to begin; topics are looked at in a circle.
        topic_limit: the most topics to look at.
        scan_from: topic id -> the ticket position at which to begin.
        among: ids of the only topics to look at. Empty: all topics.

    Returns:
        The topics that had tickets, in the order in which they were looked at.
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
        The topics that had tickets, in the order in which they were looked at. None: no ticket waits in an ordered topic.
    """
    if not connection.execute(ORDERED_WAITS, scope.arguments()).fetchone():
        return None
    arguments = {"scan_from": Jsonb({}), "ordered": True, "lane": lane, "lease": lease, **scope.arguments()}
    arguments |= {"limit": limit, "after": after, "topic_limit": topic_limit}
    # Both statements in one message to the server, which runs them as one transaction. A relay that froze between two messages
    # would keep the lock and block every other relay.
    with psycopg.ClientCursor(connection) as cursor:
        cursor.execute(f"{LOCK_ORDER};{CLAIM_ORDERED}", arguments)
        cursor.nextset()
        return [_claimed(row) for row in cursor.fetchall()]


def reclaim(connection: Connection, scope: Scope, *, lane: int, lease: timedelta, but: int | None = None) -> ClaimedBatch | None:
    """
    Claim again the batch that has been due longest, or that its relay left behind; attempt + 1.

    Args:
        but: id of a batch to leave out.
    """
    row = connection.execute(RECLAIM, {"lane": lane, "lease": lease, "but": but, **scope.arguments()}).fetchone()
    return None if row is None else _batch(row)


def _claimed(row: tuple[Any, ...]) -> ClaimedTopic:
    return row[0], row[1], None if row[2] is None else _batch(row[2:])


def _batch(row: tuple[Any, ...]) -> ClaimedBatch:
    batch_id, attempt, topic, kind, lane, first_seq, message_ids, order_keys, split, failures, tx_lane, tx_attempt = row
    return ClaimedBatch(
        batch_id,
        attempt,
        topic,
        TopicType(kind),
        lane,
        first_seq,
        message_ids,
        order_keys,
        frozenset(split),
        failures,
        transaction=None if tx_lane is None else Transaction(tx_lane, tx_attempt),
    )


FEW = 16  # messages in one claim
SMALL = 4096  # bytes of body; a batch with a larger one is loaded later

# The oldest tickets of one unordered topic become a batch of few messages, which are returned with it. The plan is as small as
# possible: where messages come one by one, starting a plan costs more than running it.
CLAIM_TOPIC = f"""
WITH topic AS (
    SELECT name, type, ordered FROM outbox_topic
    WHERE id = %(topic)s AND NOT paused AND broker = %(broker)s AND name <> ALL(%(without)s::text[])),
taken AS (
    DELETE FROM outbox_ticket WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM outbox_ticket
        WHERE topic_id = %(topic)s AND pos >= %(scan_from)s AND EXISTS (SELECT FROM topic WHERE NOT ordered)
        ORDER BY pos LIMIT {FEW} FOR UPDATE SKIP LOCKED))
    RETURNING pos, message_id),
grouped AS (
    SELECT array_agg(message_id ORDER BY pos) AS ids, count(*) AS size, max(pos) AS last_pos FROM taken HAVING count(*) > 0),
numbered AS (
    INSERT INTO outbox_lane AS lane (topic_id, lane, last_seq) SELECT %(topic)s, %(lane)s, size FROM grouped
    ON CONFLICT (topic_id, lane) DO UPDATE SET last_seq = lane.last_seq + excluded.last_seq
    RETURNING lane.last_seq),
batch AS (
    INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, state, owner, lease_until, tx_lane, tx_attempt)
    SELECT %(topic)s, %(lane)s, numbered.last_seq - grouped.size + 1, grouped.ids, {State.CLAIMED}, %(lane)s,
        clock_timestamp() + %(lease)s, {TRANSACTION}
    FROM grouped, numbered
    RETURNING id, attempt, first_seq, message_ids)
SELECT topic.name, topic.type, topic.ordered, grouped.last_pos, batch.id, batch.attempt, batch.first_seq,
    batch.message_ids::text[], message.key, message.headers, message.about,
    CASE WHEN octet_length(message.body) <= {SMALL} THEN message.body END
FROM topic LEFT JOIN (
    grouped CROSS JOIN batch CROSS JOIN unnest(batch.message_ids) WITH ORDINALITY member(id, position)) ON true
LEFT JOIN outbox_message message ON message.id = member.id
ORDER BY member.position
"""


def claim_topic(
    connection: Connection, scope: Scope, topic_id: int, *, lane: int, lease: timedelta, scan_from: int = 0
) -> tuple[str | None, bool, int | None, ClaimedBatch | None]:
    """
    Turn a few of the oldest tickets of one unordered topic into a batch, loaded with its messages.

    Args:
        scan_from: the ticket position at which to begin.

    Returns:
        The topic's name, which is None where it is paused, left out, or another broker's; whether it is ordered; the position of
        the last ticket that was claimed; and the batch, which is None where none could be claimed, and on ordered topics.
    """
    arguments = {**scope.arguments(), "topic": topic_id, "lane": lane, "lease": lease}
    # Not connection.cursor(): in tests that is Django's, which cannot read bodies in binary format.
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        rows = cursor.execute(CLAIM_TOPIC, {**arguments, "scan_from": scan_from}, binary=True).fetchall()
    if not rows:
        return None, False, None, None
    topic, kind, is_ordered, last_pos, batch_id, attempt, first_seq, message_ids = rows[0][:8]
    if batch_id is None:
        return topic, is_ordered, None, None
    messages = [row[8:] for row in rows]
    are_all_small = all(message[0] is None or message[3] is not None for message in messages)
    batch = ClaimedBatch(
        batch_id,
        attempt,
        topic,
        TopicType(kind),
        lane,
        first_seq,
        message_ids,
        messages=messages if are_all_small else None,
        transaction=Transaction(lane, attempt) if scope.in_transactions else None,
    )
    return topic, is_ordered, last_pos, batch

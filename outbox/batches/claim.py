"""
Claim and reclaim: tickets become batches; batches that were released, or whose relay died, are claimed again.

A ticket is a row that says that a message waits to be claimed. A batch holds the messages of one topic that were claimed
together. A lane is a small number that one relay holds alone; the messages of a batch get the next numbers of its relay's lane.

The messages of a batch are loaded later, in slices, by `relay/send.py`. Only `claim_topic`, which takes a few new messages of one
topic, returns them with the batch.
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
OLDEST_TICKETS = """
picked AS (
    SELECT ticket.ctid FROM scanned, LATERAL (
        SELECT ctid FROM outbox_ticket WHERE topic_id = scanned.id AND pos >= scanned.scan_from
        ORDER BY pos LIMIT (SELECT per_topic FROM share) FOR UPDATE SKIP LOCKED) ticket)"""

# The oldest tickets of each topic whose keys are free. A ticket has to wait while an unfinished or dead batch has a message of
# its key, and while another transaction has locked an earlier ticket of its key. A ticket without a key was written before the
# topic was ordered. `key IS NOT NULL`, because NOT IN is never true for a list that contains a NULL.
OLDEST_TICKETS_OF_FREE_KEYS = f"""
candidate AS (
    SELECT scanned.id AS topic_id, ticket.* FROM scanned, LATERAL (
        SELECT ctid AS row_id, pos, order_key FROM outbox_ticket WHERE topic_id = scanned.id AND pos >= scanned.scan_from
        AND (order_key IS NULL OR order_key NOT IN (
            SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state IN {UNFINISHED} AND key IS NOT NULL
            UNION ALL
            SELECT key FROM outbox_batch, unnest(order_keys) key WHERE state = {State.DEAD} AND key IS NOT NULL))
        ORDER BY pos LIMIT (SELECT per_topic FROM share)) ticket),
locked AS (
    SELECT ctid AS row_id FROM outbox_ticket WHERE ctid = ANY(ARRAY(SELECT row_id FROM candidate)) FOR UPDATE SKIP LOCKED),
picked AS (
    SELECT row_id AS ctid FROM (
        SELECT candidate.row_id, locked.row_id IS NOT NULL AS is_locked_here, candidate.pos,
            min(candidate.pos) FILTER (WHERE locked.row_id IS NULL)
                OVER (PARTITION BY candidate.topic_id, candidate.order_key) AS first_locked_elsewhere
        FROM candidate LEFT JOIN locked ON locked.row_id = candidate.row_id) marked
    WHERE is_locked_here AND (first_locked_elsewhere IS NULL OR pos < first_locked_elsewhere))"""


# `tx_lane` and `tx_attempt` of a new batch: NULL unless its relay sends in transactions of the lane.
TX_COLUMNS = "CASE WHEN %(in_transactions)s THEN %(lane)s END, CASE WHEN %(in_transactions)s THEN 1 END"


def _claim_statement(*, tickets: str, order_keys: str, among: str = "") -> str:
    """
    Return the SQL of a claim: the tickets of up to 16 topics become one batch per topic, numbered in the lane.

    `tickets` is the SQL of the CTE `picked`, `order_keys` an expression for a batch's order keys, `among` a condition for topics.

    The statement returns one row for each topic that has tickets. The LATERAL probe reads one ticket per topic; EXISTS would join
    all tickets. The topics share twice the `limit`, and at most 2,000 messages, so that the result fits into a socket's buffer
    (212 KB, which was enough for 3,400 messages with keys). If a relay froze before it had read a larger result, the statement
    could not end and would keep its locks.
    """
    return f"""
WITH scanned AS (
    SELECT topic.id, topic.name, topic.type, start.scan_from
    FROM outbox_topic topic,
    LATERAL (SELECT coalesce((%(scan_from)s::jsonb ->> topic.id::text)::bigint, 0) AS scan_from) start,
    LATERAL (SELECT 1 FROM outbox_ticket WHERE topic_id = topic.id AND pos >= start.scan_from ORDER BY pos LIMIT 1) probe
    WHERE NOT topic.paused AND topic.broker = %(broker)s AND topic.ordered = %(ordered)s
    AND topic.name <> ALL(%(without)s::text[]) AND (%(only)s::text IS NULL OR topic.name = %(only)s) {among}
    ORDER BY topic.id <= %(after)s, topic.id LIMIT %(topic_limit)s),
share AS (
    SELECT least(%(limit)s, greatest(1, least(2 * %(limit)s, {MESSAGES_PER_CLAIM}) / greatest(1, count(*)))) AS per_topic
    FROM scanned),{tickets},
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
        %(lane)s, clock_timestamp() + %(lease)s, {TX_COLUMNS}
    FROM grouped JOIN numbered USING (topic_id)
    RETURNING id, attempt, topic_id, lane, first_seq, message_ids, order_keys, tx_lane, tx_attempt)
SELECT scanned.id, grouped.last_pos, batch.id, batch.attempt, scanned.name, scanned.type, batch.lane, batch.first_seq,
    batch.message_ids::text[], batch.order_keys, '{{}}'::smallint[], 0, batch.tx_lane, batch.tx_attempt
FROM scanned LEFT JOIN batch ON batch.topic_id = scanned.id LEFT JOIN grouped ON grouped.topic_id = scanned.id
ORDER BY scanned.id <= %(after)s, scanned.id
"""


CLAIM = _claim_statement(tickets=OLDEST_TICKETS, order_keys="NULL::bigint[]")

# Probes only the given topics: a probe costs a microsecond, which adds up over thousands of topics.
CLAIM_AMONG = _claim_statement(tickets=OLDEST_TICKETS, order_keys="NULL::bigint[]", among="AND topic.id = ANY(%(among)s)")

CLAIM_ORDERED = _claim_statement(tickets=OLDEST_TICKETS_OF_FREE_KEYS, order_keys="array_agg(order_key ORDER BY pos)")

# Claims of ordered topics run one after the other. The lock is taken by a separate statement, so that the claim that follows gets
# a snapshot that is newer than the commit of the previous claim.
LOCK_ORDER = f"SELECT pg_advisory_xact_lock({Lock.ORDERED_CLAIM}, 0)"

# Whether a ticket waits in an ordered topic. If not, LOCK_ORDER is not taken.
ORDERED_WAITS = """
SELECT 1 FROM outbox_topic topic,
LATERAL (SELECT 1 FROM outbox_ticket WHERE topic_id = topic.id ORDER BY pos LIMIT 1) probe
WHERE topic.ordered AND NOT topic.paused AND topic.broker = %(broker)s AND topic.name <> ALL(%(without)s::text[])
AND (%(only)s::text IS NULL OR topic.name = %(only)s) LIMIT 1
"""

# Claim again, with attempt + 1, a batch whose lease is over or whose owner's lane is free; if there is none, the released batch
# that has been due for the longest time. So a batch that was just released comes after the others, and one that the broker never
# answers does not keep them waiting.
#
# A batch with order keys waits for all earlier unfinished and dead batches that share a key. A batch that was split off counts as
# old as its origin, since its own id only shows when it was split off. Within the same origin, the batch with the lower numbers
# is the earlier one. Between two origins the ids decide, since claims of ordered topics run one after the other; numbers would
# not, since they may be of two lanes.
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
    The topics that a claim considers: those whose rows name the broker.

    Args:
        broker: the broker's alias.
        without: names of topics to exclude.
        only: the name of the only topic to consider; None for all.
        in_transactions: whether the batches are sent in transactions of the lane.
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
The id of a topic that has tickets, the position of its last ticket that was claimed, and the batch.

The last two are None if no ticket could be claimed, because all are locked, or wait for earlier messages of their keys.
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
        lane: the lane that this relay holds; the messages get its next numbers.
        lease: how long other relays leave the batches alone, by the database's clock.
        limit: maximum number of messages per topic. All topics together get at most twice as many, and at most
            `MESSAGES_PER_CLAIM`.
        after: id of the topic after which to begin; after the last topic, the first ones follow.
        topic_limit: maximum number of topics.
        scan_from: topic id -> the ticket position at which to begin.
        among: ids of the only topics to consider; empty for all.

    Returns:
        The topics that had tickets, in the order in which they were considered.
    """
    arguments = {"scan_from": Jsonb(scan_from or {}), "ordered": False, **scope.arguments()}
    arguments |= {"lane": lane, "lease": lease, "limit": limit, "after": after, "topic_limit": topic_limit}
    statement, arguments = (CLAIM_AMONG, arguments | {"among": list(among)}) if among else (CLAIM, arguments)
    return [_claimed_topic(row) for row in connection.execute(statement, arguments).fetchall()]


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
        The topics that had tickets, in the order in which they were considered. None if no ticket waits in an ordered topic.
    """
    if not connection.execute(ORDERED_WAITS, scope.arguments()).fetchone():
        return None
    arguments = {"scan_from": Jsonb({}), "ordered": True, "lane": lane, "lease": lease, **scope.arguments()}
    arguments |= {"limit": limit, "after": after, "topic_limit": topic_limit}
    # Both statements go to the server in one message, which it runs as one transaction. With two messages, a relay that froze
    # between them would keep the lock and block every other relay.
    with psycopg.ClientCursor(connection) as cursor:
        cursor.execute(f"{LOCK_ORDER};{CLAIM_ORDERED}", arguments)
        cursor.nextset()
        return [_claimed_topic(row) for row in cursor.fetchall()]


def reclaim(connection: Connection, scope: Scope, *, lane: int, lease: timedelta, but: int | None = None) -> ClaimedBatch | None:
    """
    Claim again, with attempt + 1, a batch whose relay died or lost its lease, or the released batch that has been due longest.

    Args:
        but: id of a batch to exclude.
    """
    row = connection.execute(RECLAIM, {"lane": lane, "lease": lease, "but": but, **scope.arguments()}).fetchone()
    return None if row is None else _batch(row)


def _claimed_topic(row: tuple[Any, ...]) -> ClaimedTopic:
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


FEW = 16  # maximum number of messages in a claim of `claim_topic`
SMALL = 4096  # bytes; if a message of the batch has a larger body, the whole batch is loaded later

# The oldest tickets of one unordered topic become a batch of few messages, which are returned with the batch. The statement is
# kept as small as possible: if messages come one by one, starting its plan costs more than running it.
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
        clock_timestamp() + %(lease)s, {TX_COLUMNS}
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
        The topic's name, which is None if it is paused, excluded, or of another broker; whether the topic is ordered; the
        position of the last ticket that was claimed; and the batch, which is None if no ticket could be claimed, and on ordered
        topics.
    """
    arguments = {**scope.arguments(), "topic": topic_id, "lane": lane, "lease": lease}
    # Not connection.cursor(): in tests it returns Django's cursor, which cannot read bodies in binary format.
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

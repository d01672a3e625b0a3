"""
What operators do with batches: replay or discard dead messages, and resend messages that an audit found lost.

To replay or discard a dead message, it is moved into a new batch of one message, which is RELEASED or DISCARDED. If all remaining
messages of its batch are chosen, the state of the batch itself changes. A message whose daily partition was dropped gets its row
back from its copy in `outbox_dead`. The same statement records who did it and why.

A message that was sent and is lost is also moved into a batch of one message, with the same lane and number, so that consumers
and the audit see the missing number arrive. If it is the only message of its batch, the batch itself is released. A message row
without ticket or batch, which would never be sent, gets a ticket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from psycopg.rows import namedtuple_row

from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.database.message_rows import INSERT_COPY
from outbox.database.partitions import create_partition, rights
from outbox.database.wakeup import wake_relay
from outbox.ids import day_of
from outbox.logs import get_logger
from outbox.models import Act, State

logger = get_logger(__name__)

BATCHES_AT_ONCE = 100
MESSAGES_AT_ONCE = 500

# The dead batches of given messages: how many messages each still has, which of the given ones, and their positions.
FIND_DEAD = f"""
SELECT batch.id, cardinality(message_ids) - cardinality(split), array_agg(member.id ORDER BY position),
    array_agg(position ORDER BY position)
FROM outbox_batch batch, unnest(message_ids) WITH ORDINALITY member(id, position)
WHERE state = {State.DEAD} AND member.id = ANY(%s::uuid[]) AND position <> ALL(split) GROUP BY batch.id ORDER BY batch.id
"""

# Dead batches with the messages that each still has.
DEAD_BATCHES = f"""
SELECT batch.id, ARRAY(SELECT u.id FROM unnest(message_ids) WITH ORDINALITY u(id, position) WHERE position <> ALL(split))
FROM outbox_batch batch JOIN outbox_topic topic ON topic.id = batch.topic_id
WHERE batch.state = {State.DEAD} AND batch.id > %s AND batch.id <= %s AND (%s::text IS NULL OR topic.name = %s)
ORDER BY batch.id LIMIT %s
"""

LAST_DEAD = f"SELECT coalesce(max(id), 0) FROM outbox_batch WHERE state = {State.DEAD}"

# Record what an operator did with the messages of changed batches. `batches` is the name of a CTE with these batches.
RECORD = """
INSERT INTO outbox_operator_act (act, message_id, topic, batch_id, attempt, reason, acted_by)
SELECT %(act)s::text, acted.message_id, coalesce(topic.name, ''), {batches}.id, {batches}.attempt, %(reason)s::text, %(by)s::text
FROM {batches} LEFT JOIN outbox_topic topic ON topic.id = {batches}.topic_id, unnest({message_ids}) acted(message_id)
"""

# Release or discard whole batches, depending on `next`; reset their failures. Return the messages that were still in each batch.
REPLAY_BATCHES = f"""
WITH done AS (
    UPDATE outbox_batch SET state = %(next)s, failures = 0,
        due_at = CASE WHEN %(next)s = {State.RELEASED} THEN clock_timestamp() END
    WHERE id = ANY(%(ids)s) AND state = {State.DEAD}
    RETURNING id, topic_id, attempt,
        ARRAY(SELECT member.id FROM unnest(message_ids) WITH ORDINALITY member(id, position) WHERE position <> ALL(split))
            AS remaining_ids
), recorded AS ({RECORD.format(message_ids="remaining_ids", batches="done")})
SELECT remaining_ids FROM done
"""

# Move one message out of a dead batch, together with its order key: the batch stays dead, and keeps holding back only the keys of
# the others. Unordered batches keep NULL as their order keys, since NULL || NULL would be an array with one element.
REPLAY_MESSAGE = f"""
WITH batch AS (
    UPDATE outbox_batch SET split = split || %(position)s::smallint,
        order_keys = CASE WHEN order_keys IS NOT NULL
            THEN order_keys[:%(position)s - 1] || NULL::bigint || order_keys[%(position)s + 1:] END
    WHERE id = %(id)s AND state = {State.DEAD} AND %(position)s::smallint <> ALL(split)
    AND cardinality(message_ids) - cardinality(split) > 1
    RETURNING *
), recorded AS ({RECORD.format(message_ids="message_ids[%(position)s:%(position)s]", batches="batch")})
INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, order_keys, origin_id, state, attempt, due_at, last_error)
SELECT topic_id, lane, first_seq + %(position)s - 1, message_ids[%(position)s:%(position)s],
    (SELECT before.order_keys[%(position)s:%(position)s] FROM outbox_batch before WHERE before.id = batch.id),
    coalesce(origin_id, id), %(next)s, attempt, CASE WHEN %(next)s = {State.RELEASED} THEN clock_timestamp() END, last_error
FROM batch
"""

# Messages whose row is gone, and whether there is a copy.
WITHOUT_ROW = """
SELECT wanted.id, EXISTS (SELECT FROM outbox_dead dead WHERE dead.message_id = wanted.id AND dead.body IS NOT NULL)
FROM unnest(%s::uuid[]) wanted(id) WHERE NOT EXISTS (SELECT FROM outbox_message message WHERE message.id = wanted.id)
"""

TOO_LATE = "Another process changed this message first. Reload and try again."


class ActResult(msgspec.Struct):
    """
    The result of replaying, discarding or resending messages.

    Args:
        messages: how many were released, discarded or given a ticket.
        refused: message id -> why nothing was done with it.
    """

    messages: int = 0
    refused: dict[str, str] = msgspec.field(default_factory=dict)

    def refuse(self, message_ids: Iterable[UUID], reason: str) -> None:
        """Add messages with which nothing was done, and the reason."""
        self.refused.update({str(message_id): reason for message_id in message_ids})


def replay_messages(
    connection: Connection, message_ids: Sequence[UUID], *, by: str, reason: str = "", discard: bool = False
) -> ActResult:
    """
    Send dead messages again, or discard them.

    Args:
        connection: in autocommit, or in a transaction, which then does all or nothing.
        by: the user's name, or a command and the name of the user who ran it.
        reason: the user's reason.
        discard: mark them DISCARDED, so that they are never sent.
    """
    result = ActResult()
    next_state, act = (State.DISCARDED, Act.DISCARDED) if discard else (State.RELEASED, Act.REPLAYED)
    arguments = {"next": next_state, "act": act, "by": by, "reason": reason}
    for start in range(0, len(message_ids), MESSAGES_AT_ONCE):
        _replay_some(connection, message_ids[start : start + MESSAGES_AT_ONCE], result, arguments)
    _wake(connection, result, discard=discard)
    return result


def replay_all(connection: Connection, *, by: str, topic: str | None = None) -> ActResult:
    """
    Send all dead messages again; refuse those whose row is gone and that have no copy, since they cannot be sent.

    Later batches are left alone: while a broker refuses all messages, new ones die as fast as dead ones are sent again.

    Args:
        connection: in autocommit.
        topic: only messages of this topic; None for all topics.
        by: as for `replay_messages`.
    """
    result, after = ActResult(), 0
    [[last]] = connection.execute(LAST_DEAD).fetchall()
    while batches := connection.execute(DEAD_BATCHES, [after, last, topic, topic, BATCHES_AT_ONCE]).fetchall():
        after = batches[-1][0]
        arguments = {"next": State.RELEASED, "act": Act.REPLAYED, "by": by, "reason": ""}
        gone = set(_restore(connection, [message_id for _, message_ids in batches for message_id in message_ids]))
        whole = [batch_id for batch_id, message_ids in batches if gone.isdisjoint(message_ids)]
        rows = connection.execute(REPLAY_BATCHES, arguments | {"ids": whole}).fetchall()
        result.messages += sum(len(ids) for (ids,) in rows)
        for _, message_ids in batches:
            if not gone.isdisjoint(message_ids):
                _replay_some(connection, message_ids, result, arguments)
    _wake(connection, result, discard=False)
    return result


def _replay_some(connection: Connection, message_ids: Sequence[UUID], result: ActResult, arguments: dict[str, object]) -> None:
    """Replay or discard dead messages, and add them to `result`; refuse messages that are not dead or cannot be sent."""
    dead = connection.execute(FIND_DEAD, [list(message_ids)]).fetchall()
    dead_ids = [message_id for _, _, ids, _ in dead for message_id in ids]
    result.refuse(set(message_ids) - set(dead_ids), "It is not dead.")
    without_copy = set() if arguments["act"] is Act.DISCARDED else set(_restore(connection, dead_ids))
    result.refuse(without_copy, "Its message row is gone, and there is no copy. Discard it.")
    whole_batches: dict[int, set[UUID]] = {}
    for batch_id, remaining, ids, positions in dead:
        chosen = {
            message_id: position for message_id, position in zip(ids, positions, strict=True) if message_id not in without_copy
        }
        if len(chosen) == remaining:
            whole_batches[batch_id] = set(chosen)
        else:
            _replay_each(connection, batch_id, chosen, result, arguments)
    rows = connection.execute(REPLAY_BATCHES, arguments | {"ids": list(whole_batches)}).fetchall() if whole_batches else []
    changed = {message_id for (ids,) in rows for message_id in ids}
    result.messages += len(changed)
    result.refuse({message_id for ids in whole_batches.values() for message_id in ids} - changed, TOO_LATE)


def _replay_each(
    connection: Connection, batch_id: int, positions: Mapping[UUID, int], result: ActResult, arguments: dict[str, object]
) -> None:
    """Replay or discard some messages of a dead batch; the others stay in it."""
    for message_id, position in positions.items():
        if connection.execute(REPLAY_MESSAGE, arguments | {"id": batch_id, "position": position}).rowcount:
            result.messages += 1
        else:
            result.refuse([message_id], TOO_LATE)


def _restore(connection: Connection, message_ids: Sequence[UUID]) -> list[UUID]:
    """Restore missing message rows from their copies; return the messages that have no copy."""
    gone = connection.execute(WITHOUT_ROW, [list(message_ids)]).fetchall()
    with_copy = [message_id for message_id, has_copy in gone if has_copy]
    # A role without the right leaves the rows in the DEFAULT partition, until the maintenance of the tables' owner moves them.
    if with_copy and rights(connection).may_create:
        for day in sorted({day_of(message_id) for message_id in with_copy}):
            create_partition(connection, day)
    if with_copy:
        connection.execute(INSERT_COPY, [with_copy])
    return [message_id for message_id, has_copy in gone if not has_copy]


def _wake(connection: Connection, result: ActResult, *, discard: bool) -> None:
    if result.messages:
        logger.info("An operator %s %s dead messages.", "discarded" if discard else "replayed", result.messages)
        wake_relay(connection)


# Resends run one after the other, so that each sees the changes of the ones before.
LOCK = f"SELECT pg_advisory_xact_lock({Lock.RESEND}, 0)"

# The current states of messages, and when they were last sent.
READ_STATE = """
SELECT id, state, batch_id, position, sent_at FROM outbox_message_state WHERE id = ANY(%s) ORDER BY created_at DESC, id DESC
"""

# Move one message out of a sent batch into a new batch, which is released.
RESEND_ONE = f"""
WITH batch AS (
    UPDATE outbox_batch SET split = split || %(position)s::smallint
    WHERE id = %(batch)s AND state = {State.SENT} AND %(position)s::smallint <> ALL(split) AND cardinality(message_ids) > 1
    RETURNING *
)
INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, order_keys, origin_id, state, attempt, due_at)
SELECT topic_id, lane, first_seq + %(position)s - 1, message_ids[%(position)s:%(position)s],
    order_keys[%(position)s:%(position)s], coalesce(origin_id, id), {State.RELEASED}, attempt, clock_timestamp()
FROM batch
"""

RESEND_BATCH = f"""
UPDATE outbox_batch SET state = {State.RELEASED}, failures = 0, due_at = clock_timestamp(), half_ids = NULL, open = NULL,
    half_places = NULL, ends_until = NULL, tx_lane = NULL, tx_attempt = NULL
WHERE id = %(batch)s AND state = {State.SENT} AND cardinality(message_ids) = 1
"""

MAX_LOCKED_KEYS = 1000  # if there are more, the topics are locked instead, as in `publishing/key_locks.py`

# The keys of messages on ordered topics.
FIND_KEYS = """
SELECT DISTINCT message.topic_id, hashtext(message.key)
FROM outbox_message message JOIN outbox_topic topic ON topic.id = message.topic_id
WHERE message.id = ANY(%s) AND topic.ordered
"""

# Take the locks of publishers (publishing/key_locks.py), in the same order, so that no later ticket of a key is uncommitted.
LOCK_TOPICS = f"SELECT pg_advisory_xact_lock({Lock.TOPIC_KEYS}, id) FROM unnest(%s::int[]) AS id"
SHARE_TOPICS = f"SELECT pg_advisory_xact_lock_shared({Lock.TOPIC_KEYS}, id) FROM unnest(%s::int[]) AS id"
LOCK_KEYS = f"SELECT pg_advisory_xact_lock({Lock.KEY}, hash) FROM unnest(%s::int[]) AS hash"

LOST = """
WITH lost AS (
    SELECT message.id, topic.id AS topic_id, message.created_at,
        CASE WHEN topic.ordered THEN hashtextextended(message.key, topic.id) END AS order_key
    FROM outbox_message message JOIN outbox_topic topic ON topic.id = message.topic_id WHERE message.id = %s)
"""

# Insert a ticket before the tickets of later messages of the same key. The position before them is free, since the message had a
# ticket once.
INSERT_AHEAD = f"""
{LOST}
INSERT INTO outbox_ticket (pos, message_id, topic_id, order_key)
SELECT first.pos, lost.id, lost.topic_id, lost.order_key
FROM lost CROSS JOIN LATERAL (
    SELECT greatest(0, min(ticket.pos) - 1) AS pos
    FROM outbox_ticket ticket JOIN outbox_message later ON later.id = ticket.message_id
    WHERE ticket.topic_id = lost.topic_id AND ticket.order_key = lost.order_key
    AND (later.created_at, later.id) > (lost.created_at, lost.id) HAVING count(*) > 0) first
"""

# Insert a ticket if no later message of the key waits.
INSERT_TICKET = f"{LOST} INSERT INTO outbox_ticket (message_id, topic_id, order_key) SELECT id, topic_id, order_key FROM lost"

GONE = "The outbox does not have it: it was pruned, or never published."
SENT_SINCE = "It was sent again after that audit."
REFUSED = {
    "dead": "It is dead: replay it with the other dead messages.",
    "discarded": "It was dead, and an operator discarded it.",
}


def resend(connection: Connection, message_ids: Sequence[UUID], *, lost_before: datetime) -> ActResult:
    """
    Resend messages that were sent, and give a ticket to those that have none. Messages that are on their way are refused.

    On an ordered topic, messages of a key are sent in the order in which they were published, and before later waiting ones.

    Args:
        connection: in a READ COMMITTED transaction.
        lost_before: the time at which the audit found them lost; messages that were sent later are refused.
    """
    result = ActResult()
    connection.execute(LOCK)
    rows: list[Any] = connection.cursor(row_factory=namedtuple_row).execute(READ_STATE, [list(message_ids)]).fetchall()
    states = {row.id: row for row in rows}
    result.refuse([message_id for message_id in message_ids if message_id not in states], GONE)
    _lock_keys(connection, [row.id for row in rows if row.state == "lost"])
    for row in rows:
        if reason := _reason_to_refuse(row, lost_before):
            result.refuse([row.id], reason)
        else:
            _resend_one(connection, row)
            result.messages += 1
    if result.messages:
        logger.info("An operator resent %s lost messages.", result.messages)
        wake_relay(connection)
    return result


def _lock_keys(connection: Connection, message_ids: Sequence[UUID]) -> None:
    """Take the locks of publishers for the keys of messages on ordered topics; with very many keys, lock their topics instead."""
    keys = connection.execute(FIND_KEYS, [list(message_ids)]).fetchall()
    topics, hashes = sorted({topic for topic, _ in keys}), sorted({order_key for _, order_key in keys})
    if len(hashes) > MAX_LOCKED_KEYS:
        connection.execute(LOCK_TOPICS, [topics])
    elif keys:
        connection.execute(SHARE_TOPICS, [topics])
        connection.execute(LOCK_KEYS, [hashes])


def _reason_to_refuse(row: Any, lost_before: datetime) -> str:
    """Return why a message is not resent; "" if it can be resent."""
    if row.state not in ("sent", "lost"):
        return REFUSED.get(row.state, f"It is on its way: {row.state}.")
    return SENT_SINCE if row.sent_at is not None and row.sent_at > lost_before else ""


def _resend_one(connection: Connection, row: Any) -> None:
    arguments = {"batch": row.batch_id, "position": row.position}
    if row.state == "lost":
        if not connection.execute(INSERT_AHEAD, [row.id]).rowcount:
            connection.execute(INSERT_TICKET, [row.id])
    elif not connection.execute(RESEND_ONE, arguments).rowcount:
        connection.execute(RESEND_BATCH, arguments)

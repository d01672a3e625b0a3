"""
Resend: send decided or sent messages again, under a new token, because their broker does not have them.

After a discard (PREPARED to RELEASED): the broker reports that it rolled back or discarded the half message. After an audit
(SENT to RELEASED): an operator resends messages that an audit found lost after the outbox had sent them. A message leaves its
batch for a batch of one, with the same lane and number, so that consumers and audit find the missing number; a batch of one is
released itself. A message row without ticket or batch, which would never be sent, gets a ticket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from psycopg.rows import class_row

from outbox.batches.batch import PreparedBatch
from outbox.batches.retry import RetryResult
from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.database.wakeup import wake_relay
from outbox.logs import get_logger
from outbox.models import State

logger = get_logger(__name__)

# A batch of one message. `split` takes discarded half messages out of a larger batch first.
RESEND_DISCARDED = f"""
UPDATE outbox_batch SET state = {State.RELEASED}, due_at = clock_timestamp() + %(wait)s, half_ids = NULL, open = NULL,
    half_places = NULL, ends_until = NULL, tries = tries + 1, last_error = %(error)s
WHERE id = %(id)s AND state = {State.PREPARED} AND attempt = %(attempt)s AND cardinality(message_ids) = 1 RETURNING id
"""

# One resend at a time: the second sees what the first has done.
LOCK = f"SELECT pg_advisory_xact_lock({Lock.RESEND}, 0)"

# The current states of messages, and when they were last sent.
READ_STATE = """
SELECT id, state, batch_id, position, sent_at FROM outbox_message_state WHERE id = ANY(%s) ORDER BY created_at DESC, id DESC
"""

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
UPDATE outbox_batch SET state = {State.RELEASED}, tries = 0, due_at = clock_timestamp(), half_ids = NULL, open = NULL,
    half_places = NULL, ends_until = NULL
WHERE id = %(batch)s AND state = {State.SENT} AND cardinality(message_ids) = 1
"""

MOST_KEYS = 1000  # that are locked one by one, as publishers do

# The keys of messages on ordered topics.
FIND_KEYS = """
SELECT DISTINCT message.topic_id, hashtext(message.key)
FROM outbox_message message JOIN outbox_topic topic ON topic.id = message.topic_id
WHERE message.id = ANY(%s) AND topic.ordered
"""

# Locked as their publishers lock them (publishing/key_locks.py), in their order: no later ticket of a key is uncommitted then.
LOCK_TOPICS = f"SELECT pg_advisory_xact_lock({Lock.TOPIC_KEYS}, id) FROM unnest(%s::int[]) AS id"
SHARE_TOPICS = f"SELECT pg_advisory_xact_lock_shared({Lock.TOPIC_KEYS}, id) FROM unnest(%s::int[]) AS id"
LOCK_KEYS = f"SELECT pg_advisory_xact_lock({Lock.KEY}, hash) FROM unnest(%s::int[]) AS hash"

LOST = """
WITH lost AS (
    SELECT message.id, topic.id AS topic_id, message.created_at,
        CASE WHEN topic.ordered THEN hashtextextended(message.key, topic.id) END AS order_key
    FROM outbox_message message JOIN outbox_topic topic ON topic.id = message.topic_id WHERE message.id = %s)
"""

# The ticket comes before those of later messages of the key. Its position is free for that key: the message had a ticket once.
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

# Where no later message of the key waits.
INSERT_TICKET = f"{LOST} INSERT INTO outbox_ticket (message_id, topic_id, order_key) SELECT id, topic_id, order_key FROM lost"

GONE = "The outbox does not have it: it was pruned, or never published."
SENT_SINCE = "It was sent again after that audit."
REFUSED = {
    "dead": "It is dead: retry it with the other dead messages.",
    "skipped": "It was dead, and an operator skipped it.",
}


@dataclass(frozen=True, slots=True)
class _MessageState:
    id: UUID
    state: str
    batch_id: int | None
    position: int | None
    sent_at: datetime | None


def resend_discarded(connection: Connection, batch: PreparedBatch, *, wait: timedelta, error: str) -> bool:
    """
    Release a prepared batch of one whose half message was rolled back or discarded.

    Args:
        wait: how long until it may be claimed again.

    Returns:
        False when the fence was lost.
    """
    arguments = {"id": batch.id, "attempt": batch.attempt, "wait": wait, "error": error}
    return connection.execute(RESEND_DISCARDED, arguments).fetchone() is not None


def resend(connection: Connection, message_ids: Sequence[UUID], *, lost_before: datetime) -> RetryResult:
    """
    Resend messages that were sent, and send those that have no ticket; messages that are on their way are refused.

    Those of one key on an ordered topic go in the order in which they were published, and before later ones that still wait.

    Args:
        connection: in a transaction, READ COMMITTED.
        lost_before: when the audit found them lost; messages that were sent later are refused.
    """
    result = RetryResult()
    connection.execute(LOCK)
    rows = connection.cursor(row_factory=class_row(_MessageState)).execute(READ_STATE, [list(message_ids)]).fetchall()
    states = {row.id: row for row in rows}
    result.refuse([one for one in message_ids if one not in states], GONE)
    _lock_keys(connection, [row.id for row in rows if row.state == "lost"])
    for row in rows:
        if reason := _why_not(row, lost_before):
            result.refuse([row.id], reason)
        else:
            _resend_one(connection, row)
            result.messages += 1
    if result.messages:
        logger.info("%s lost messages were resent by an operator", result.messages)
        wake_relay(connection)
    return result


def _lock_keys(connection: Connection, message_ids: Sequence[UUID]) -> None:
    keys = connection.execute(FIND_KEYS, [list(message_ids)]).fetchall()
    topics, hashes = sorted({topic for topic, _ in keys}), sorted({one for _, one in keys})
    if len(hashes) > MOST_KEYS:
        connection.execute(LOCK_TOPICS, [topics])
    elif keys:
        connection.execute(SHARE_TOPICS, [topics])
        connection.execute(LOCK_KEYS, [hashes])


def _why_not(row: _MessageState, lost_before: datetime) -> str:
    """Return why a message is not resent; "" if it is."""
    if row.state not in ("sent", "lost"):
        return REFUSED.get(row.state, f"It is on its way: {row.state}.")
    return SENT_SINCE if row.sent_at is not None and row.sent_at > lost_before else ""


def _resend_one(connection: Connection, row: _MessageState) -> None:
    place = {"batch": row.batch_id, "position": row.position}
    if row.state == "lost":
        if not connection.execute(INSERT_AHEAD, [row.id]).rowcount:
            connection.execute(INSERT_TICKET, [row.id])
    elif not connection.execute(RESEND_ONE, place).rowcount:
        connection.execute(RESEND_BATCH, place)

"""
The steps of a batch that a relay holds: to decide it, mark it sent, return it, give it up, or send it again.

A claimed batch whose half messages are stored becomes PREPARED; this update is the decision to commit them. A batch whose
messages the broker has confirmed becomes SENT. A batch of which no message was accepted is returned: it becomes RELEASED, or DEAD
if all its messages were rejected. If the results of its messages differ, `split.py` divides it. Each step names the batch's state
and attempt; see `fence.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from outbox import signals
from outbox.batches.batch import ClaimedBatch, PreparedBatch, places_as_stored
from outbox.batches.fence import take_step
from outbox.database import Connection
from outbox.logs import get_logger, log_fields
from outbox.models import State

logger = get_logger(__name__)

DeadNotice = tuple[str, str, str]  # of a message that has just become dead: its id, its topic, and the reason

DECIDE = f"""
UPDATE outbox_batch SET state = {State.PREPARED}, half_ids = %(half_ids)b::text[], half_places = %(half_places)b::text[],
    decided_at = clock_timestamp(), ends_until = clock_timestamp() + %(window)s::interval, lease_until = NULL
WHERE id = %(id)s AND state = {State.CLAIMED} AND attempt = %(attempt)s RETURNING id
"""


def decide(
    connection: Connection,
    batch: ClaimedBatch,
    half_ids: Sequence[str | None],
    *,
    half_places: Mapping[int, str],
    window: timedelta | None,
) -> None:
    """
    Decide to commit all half messages of a batch. If some are not stored, call `split_at_decision` instead.

    Args:
        half_ids: one per position; None for positions that were split off before.
        half_places: position -> where the broker stores the half message.
        window: how long the caller may end the half messages; None for no limit.

    Raises:
        FenceLost: this call has not decided the batch.
    """
    arguments = {
        "id": batch.id,
        "attempt": batch.attempt,
        "half_ids": half_ids,
        "half_places": places_as_stored(half_places, len(batch.message_ids)),
        "window": window,
    }
    take_step(connection, DECIDE, arguments)


# RETURNING is needed, since a row count would not show which batches were marked.
MARK_SENT = f"""
UPDATE outbox_batch b SET state = {State.SENT}, sent_at = clock_timestamp(), lease_until = NULL, open = NULL
FROM unnest(%s::bigint[], %s::bigint[]) s(id, attempt)
WHERE b.id = s.id AND b.state = %s AND b.attempt = s.attempt RETURNING b.id
"""

LEAVE_OPEN = f"""
UPDATE outbox_batch SET open = %s::smallint[] WHERE id = %s AND state = {State.PREPARED} AND attempt = %s RETURNING id
"""


def mark_sent(connection: Connection, batches: Iterable[ClaimedBatch | PreparedBatch], *, state: State) -> set[int]:
    """
    Mark batches SENT.

    Args:
        state: their current state: CLAIMED if they were sent in one phase, PREPARED if in two.

    Returns:
        The ids of the batches that this call has marked; for the others, the fence was lost.
    """
    chosen = list(batches)
    arguments = [[batch.id for batch in chosen], [batch.attempt for batch in chosen], state]
    return {row[0] for row in connection.execute(MARK_SENT, arguments).fetchall()}


def leave_open(connection: Connection, batch: PreparedBatch, positions: Sequence[int]) -> None:
    """Store which commits of a prepared batch have no answer yet. Raises FenceLost."""
    take_step(connection, LEAVE_OPEN, [list(positions), batch.id, batch.attempt])


RETURN_BATCH = f"""
UPDATE outbox_batch SET state = CASE WHEN %(dead)s THEN {State.DEAD} ELSE {State.RELEASED} END,
    failures = failures + %(counted)s::int, due_at = clock_timestamp() + %(wait)s, lease_until = NULL, last_error = %(error)s
WHERE id = %(id)s AND state = {State.CLAIMED} AND attempt = %(attempt)s RETURNING id
"""

# Release what the last holder of a lane had claimed. The caller holds the lock of the lane, so that holder has ended.
RELEASE_LEFT = f"""
UPDATE outbox_batch SET state = {State.RELEASED}, due_at = clock_timestamp(), lease_until = NULL
WHERE state = {State.CLAIMED} AND owner = %s
"""


def return_batch(
    connection: Connection, batch: ClaimedBatch, *, wait: timedelta, error: str, is_counted: bool, is_dead: bool
) -> list[DeadNotice]:
    """
    Release a claimed batch, or mark it DEAD; return the messages that have become dead.

    Args:
        wait: the time after which it may be claimed again.
        is_counted: whether its `failures` are incremented.
        is_dead: whether the broker rejected all its messages.

    Raises:
        FenceLost: nothing was changed.
    """
    arguments = {"id": batch.id, "attempt": batch.attempt, "dead": is_dead, "counted": is_counted, "wait": wait, "error": error}
    take_step(connection, RETURN_BATCH, arguments)
    return copy_dead(connection, [batch.id]) if is_dead else []


def release_left(connection: Connection, lane: int) -> int:
    """Release the batches that the last holder of a lane had claimed and not decided; return how many."""
    return connection.execute(RELEASE_LEFT, [lane]).rowcount


# Nothing proves any more whether the message was published: the broker has neither the half message nor the message, and does not
# keep messages of that age. To send it again might publish it twice; to mark it SENT might lose it. So an operator has to decide:
# replay sends it again, discard accepts it as published.
GIVE_UP = f"""
UPDATE outbox_batch SET state = {State.DEAD}, last_error = %(error)s, half_ids = NULL, half_places = NULL, open = NULL,
    ends_until = NULL
WHERE id = %(id)s AND state = {State.PREPARED} AND attempt = %(attempt)s AND cardinality(message_ids) = 1 RETURNING id
"""


def give_up_unproven(connection: Connection, batch: PreparedBatch, *, error: str) -> list[DeadNotice]:
    """Mark a prepared batch of one message DEAD, and return the message. A larger batch is split by `split_at_commit`."""
    arguments = {"id": batch.id, "attempt": batch.attempt, "error": error}
    take_step(connection, GIVE_UP, arguments)
    return copy_dead(connection, [batch.id])


# The batch has one message: from a larger one, `split_at_commit` splits off messages whose half messages were discarded.
RESEND_DISCARDED = f"""
UPDATE outbox_batch SET state = {State.RELEASED}, due_at = clock_timestamp() + %(wait)s, half_ids = NULL, open = NULL,
    half_places = NULL, ends_until = NULL, failures = failures + 1, last_error = %(error)s
WHERE id = %(id)s AND state = {State.PREPARED} AND attempt = %(attempt)s AND cardinality(message_ids) = 1 RETURNING id
"""


def resend_discarded(connection: Connection, batch: PreparedBatch, *, wait: timedelta, error: str) -> None:
    """
    Release a prepared batch of one message, whose half message was rolled back or discarded, so that it is sent again.

    Args:
        wait: the time after which it may be claimed again.

    Raises:
        FenceLost: nothing was changed.
    """
    arguments = {"id": batch.id, "attempt": batch.attempt, "wait": wait, "error": error}
    take_step(connection, RESEND_DISCARDED, arguments)


INSERT_FAILED_SEND = """
INSERT INTO outbox_failed_send (batch_id, attempt, message_ids, verdict, reason) VALUES (%s, %s, %s::uuid[], %s, %s)
"""

# Copy the messages of dead batches, so that pruning may drop their daily partition without losing them. If a message has a copy
# already, because it was dead before and an operator replayed it, the copy gets the newest reason.
COPY_DEAD = f"""
INSERT INTO outbox_dead AS dead (message_id, batch_id, topic, key, headers, about, body, lane, number, reason)
SELECT member.id, batch.id, topic.name, coalesce(message.key, ''), coalesce(message.headers, '{{}}'), message.about,
    message.body, batch.lane, batch.first_seq + member.position - 1, coalesce(batch.last_error, '')
FROM outbox_batch batch JOIN outbox_topic topic ON topic.id = batch.topic_id,
    unnest(batch.message_ids) WITH ORDINALITY member(id, position) LEFT JOIN outbox_message message ON message.id = member.id
WHERE batch.id = ANY(%s) AND batch.state = {State.DEAD} AND member.position <> ALL(batch.split)
ON CONFLICT (message_id) DO UPDATE SET batch_id = excluded.batch_id, reason = excluded.reason, died_at = excluded.died_at
RETURNING dead.message_id::text, dead.topic, dead.reason
"""


def record_failed_send(
    connection: Connection, batch_id: int, attempt: int, message_ids: Sequence[str], *, verdict: str, reason: str
) -> None:
    """Record the failed send of some messages of a batch. `verdict`: the `SplitReason`."""
    connection.execute(INSERT_FAILED_SEND, [batch_id, attempt, list(message_ids), verdict, reason])


def copy_dead(connection: Connection, batch_ids: Sequence[int]) -> list[DeadNotice]:
    """Copy the messages of dead batches, in the transaction that marks the batches DEAD; return the messages."""
    if not batch_ids:
        return []
    return connection.execute(COPY_DEAD, [list(batch_ids)]).fetchall()


def notify_dead(dead: Sequence[DeadNotice]) -> None:
    """Log dead messages and send the signal `message_dead`; call it after the database commit."""
    for message_id, topic, reason in dead:
        extra = log_fields(message_id=message_id, topic=topic)
        logger.error("Message %s on topic %r is dead (see outbox_replay --unsent): %s", message_id, topic, reason, extra=extra)
        signals.message_dead.send_robust(sender=copy_dead, message_id=message_id, topic=topic, reason=reason)

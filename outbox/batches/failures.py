"""Record failed sends, and copy dead messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outbox import signals
from outbox.database import Connection
from outbox.logs import get_logger, log_fields
from outbox.models import State

logger = get_logger(__name__)

NOTE_FAILURE = """
INSERT INTO outbox_attempt (batch_id, attempt, message_ids, verdict, reason) VALUES (%s, %s, %s::uuid[], %s, %s)
"""

# Copy the messages of dead batches, so that their day can be dropped without losing them. A message that an operator sent
# again, and that died once more, gets its newest reason.
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


@dataclass(frozen=True, slots=True)
class DeadNotice:
    """A message that has just become dead."""

    message_id: str
    topic: str
    reason: str


def note_failure(
    connection: Connection, batch_id: int, attempt: int, message_ids: Sequence[str], *, verdict: str, reason: str
) -> None:
    """Record a failed send."""
    connection.execute(NOTE_FAILURE, [batch_id, attempt, list(message_ids), verdict, reason])


def copy_dead(connection: Connection, batch_ids: Sequence[int]) -> list[DeadNotice]:
    """Copy the messages of dead batches, in the transaction that marks them DEAD."""
    if not batch_ids:
        return []
    return [DeadNotice(*row) for row in connection.execute(COPY_DEAD, [list(batch_ids)]).fetchall()]


def notify_dead(dead: Sequence[DeadNotice]) -> None:
    """Log dead messages and send the signal `message_dead`; call it after the database commit."""
    for message in dead:
        extra = log_fields(message_id=message.message_id, topic=message.topic)
        text = "Message %s on topic %r is dead (see outbox_retry): %s"
        logger.error(text, message.message_id, message.topic, message.reason, extra=extra)
        signals.message_dead.send_robust(
            sender=copy_dead, message_id=message.message_id, topic=message.topic, reason=message.reason
        )

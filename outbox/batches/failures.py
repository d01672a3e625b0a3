"""What is written down beside a step: sends that failed, and copies of messages that are dead."""

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

# Copy the messages of dead batches, so that their day can be dropped without losing them. One that an operator had sent
# again and that died once more keeps its newest reason.
COPY_DEAD = f"""
INSERT INTO outbox_dead AS d (message_id, batch_id, topic, key, headers, about, body, lane, number, reason)
SELECT u.id, b.id, t.name, coalesce(m.key, ''), coalesce(m.headers, '{{}}'), m.about, m.body,
       b.lane, b.first_seq + u.n - 1, coalesce(b.last_error, '')
FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id,
     unnest(b.message_ids) WITH ORDINALITY u(id, n) LEFT JOIN outbox_message m ON m.id = u.id
WHERE b.id = ANY(%s) AND b.state = {State.DEAD} AND u.n <> ALL(b.split)
ON CONFLICT (message_id) DO UPDATE SET batch_id = excluded.batch_id, reason = excluded.reason, died_at = excluded.died_at
RETURNING d.message_id::text, d.topic, d.reason
"""


@dataclass(frozen=True, slots=True)
class DeadNotice:
    """A message that is dead now."""

    message_id: str
    topic: str
    reason: str


def note_failure(
    connection: Connection, batch_id: int, attempt: int, message_ids: Sequence[str], *, verdict: str, reason: str
) -> None:
    """Write down a send that failed."""
    connection.execute(NOTE_FAILURE, [batch_id, attempt, list(message_ids), verdict, reason])


def copy_dead(connection: Connection, batch_ids: Sequence[int]) -> list[DeadNotice]:
    """Copy the messages of dead batches; in the transaction that makes them so."""
    if not batch_ids:
        return []
    return [DeadNotice(*row) for row in connection.execute(COPY_DEAD, [list(batch_ids)]).fetchall()]


def notify_dead(dead: Sequence[DeadNotice]) -> None:
    """Notify listeners and the log of messages that are dead; after the database commit."""
    for message in dead:
        extra = log_fields(message_id=message.message_id, topic=message.topic)
        text = "Message %s on topic %r is dead, see outbox_retry: %s"
        logger.error(text, message.message_id, message.topic, message.reason, extra=extra)
        signals.message_dead.send_robust(
            sender=copy_dead, message_id=message.message_id, topic=message.topic, reason=message.reason
        )

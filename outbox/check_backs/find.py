"""Find the half message of a message in the database, for an operator who knows the message id only."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from outbox.database import Connection
from outbox.message import Half, Token

# A message has a half message where a batch of a transaction topic holds it; once decided, the batch names the half. The
# first half message of one that went half first has no lane, and no batch in its token.
FIND = """
SELECT s.topic, s.state, s.key, s.created_at, source.id,
       CASE WHEN s.lane IS NULL AND s.attempt = 1 THEN 0 ELSE s.batch_id END, s.attempt, s.position,
       coalesce(b.half_ids[s.position], ''),
       t.type = 'transaction' AND (s.state NOT IN ('prepared', 'sent') OR b.half_ids[s.position] IS NOT NULL)
FROM outbox_source source, outbox_message_state s
LEFT JOIN outbox_batch b ON b.id = s.batch_id LEFT JOIN outbox_topic t ON t.id = s.topic_id
WHERE s.id = %s
"""


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """
    A message in its database.

    Args:
        state: as in `outbox_message_state`.
        half: None where it has no half message: it still waits, or is sent in one phase.
    """

    topic: str
    state: str
    half: Half | None


def find(connection: Connection, message_id: UUID) -> FoundMessage | None:
    """Return a message with the half message that a broker would ask about, if any; None where there is no such message."""
    row = connection.execute(FIND, [message_id]).fetchone()
    if row is None:
        return None
    topic, state, key, created_at, source, batch, attempt, position, half_id, has_half = row
    if batch is None or not has_half:
        return FoundMessage(topic, state, None)
    token = Token(source, batch, attempt, position)
    return FoundMessage(topic, state, Half(topic, str(message_id), half_id, str(token), born_at=created_at, key=key))

"""The record of check-backs: each question, the decided answer, and the answer that was sent where that is another one."""

from __future__ import annotations

from outbox.check_backs.resolve import Answer
from outbox.database import Connection
from outbox.logs import cut
from outbox.message import Half, Resolution

# A repeated request (its sender got no answer, or it is replayed) stays one row, with its last answer. No row is returned when
# the request id was used for another half message before.
RECORD = """
INSERT INTO outbox_check_back AS c
    (request_id, asked_by, topic, message_id, half_id, token, nth, answer, sent_answer, reason, about, milliseconds)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, '', %s, %s, %s)
ON CONFLICT (request_id) DO UPDATE
SET answer = excluded.answer, sent_answer = '', reason = excluded.reason, about = excluded.about,
    milliseconds = excluded.milliseconds, answered_at = clock_timestamp()
WHERE (c.topic, c.message_id, c.half_id, c.token)
    = (excluded.topic, excluded.message_id, excluded.half_id, excluded.token)
RETURNING id
"""

# The newest row of that question; the message's id finds it by an index.
NOTE_SENT = """
UPDATE outbox_check_back SET sent_answer = %s WHERE id = (
    SELECT id FROM outbox_check_back WHERE message_id = %s AND half_id = %s AND nth = %s ORDER BY id + 0 DESC LIMIT 1)
"""


def record(connection: Connection, half: Half, answer: Answer, *, request_id: str, asked_by: str, milliseconds: float) -> bool:
    """
    Record a question and its answer.

    Args:
        request_id: the id of the question; a repeated question has the same one.
        asked_by: endpoint, broker, command or admin.

    Returns:
        False when the id was used for another half message; nothing is written then.
    """
    values = (
        request_id,
        asked_by,
        half.topic,
        half.message_id,
        half.half_id,
        half.token,
        half.asked,
        answer.resolution,
        cut(answer.reason),
        answer.about,
        milliseconds,
    )
    return connection.execute(RECORD, values).fetchone() is not None


def note_sent(connection: Connection, half: Half, resolution: Resolution) -> bool:
    """
    Record that the broker was sent another answer than the decided one, which stays in the row.

    Returns:
        False when no such question is recorded.
    """
    values = (resolution, half.message_id, half.half_id, half.asked)
    return connection.execute(NOTE_SENT, values).rowcount > 0

"""The record of check-backs: each question of a broker, what was decided, and what the broker was sent instead."""

from __future__ import annotations

from outbox.check_backs.resolve import Answer
from outbox.database import Connection
from outbox.message import Half, Resolution

# A request that comes again (its sender heard nothing, or somebody replays it) stays one row, with the last answer it
# got. No row comes back when the request's id was given to another half message before.
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
    Write down what a broker was told.

    Args:
        request_id: one per question; a repeat of the question carries it again.
        asked_by: the door it came through: endpoint, broker, command or admin.

    Returns:
        False when the id stands for another half message; nothing is written then.
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
        answer.reason,
        answer.about,
        milliseconds,
    )
    return connection.execute(RECORD, values).fetchone() is not None


def note_sent(connection: Connection, half: Half, resolution: Resolution) -> bool:
    """
    Write down that the broker was sent another answer than was decided; the decision stays in its row.

    Returns:
        False when no such question is recorded.
    """
    values = (resolution, half.message_id, half.half_id, half.asked)
    return connection.execute(NOTE_SENT, values).rowcount > 0

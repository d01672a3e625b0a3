"""The book of check-backs: each question of a broker, and what it was told."""

from __future__ import annotations

from outbox.check_backs.resolve import Answer
from outbox.database import Connection
from outbox.message import Half

# A request that comes again (its sender heard nothing, or somebody replays it) stays one row, with the last answer it
# got. No row comes back when the request's id was given to another half message before.
RECORD = """
INSERT INTO outbox_check_back AS c
    (request_id, asked_by, topic, message_id, half_id, token, nth, answer, reason, about, milliseconds)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (request_id) DO UPDATE
SET answer = excluded.answer, reason = excluded.reason, about = excluded.about,
    milliseconds = excluded.milliseconds, answered_at = clock_timestamp()
WHERE (c.topic, c.message_id, c.half_id, c.token)
    = (excluded.topic, excluded.message_id, excluded.half_id, excluded.token)
RETURNING id
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

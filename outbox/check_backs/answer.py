"""
Answer check-backs of the endpoint, brokers, the command and the admin: decide the answer, record it, and send the signals.

The functions never raise, and wait only briefly for locks and statements. The table of check-backs has each question, the decided
answer, and the answer that was sent to the broker if that is another one.
"""

from __future__ import annotations

import time
from uuid import uuid4

import psycopg
from django.db import DEFAULT_DB_ALIAS
from msgspec.structs import asdict

from outbox import signals
from outbox.check_backs import sources
from outbox.check_backs.resolve import Answer, resolve
from outbox.check_backs.sources import fields_of
from outbox.database import Connection
from outbox.logs import cut, get_logger
from outbox.message import UNKNOWN, Half, Resolution
from outbox.models import CheckBack

# Record an answer. A request that is repeated, since its sender got no answer or somebody replays it, keeps its one row, with the
# last answer. No row is returned if the request id was used for another half message before.
RECORD = """
INSERT INTO outbox_check_back AS c
    (request_id, asked_by, topic, message_id, half_id, token, asked, answer, sent_answer, reason, about, milliseconds)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, '', %s, %s, %s)
ON CONFLICT (request_id) DO UPDATE
SET answer = excluded.answer, sent_answer = '', reason = excluded.reason, about = excluded.about,
    milliseconds = excluded.milliseconds, answered_at = clock_timestamp()
WHERE (c.topic, c.message_id, c.half_id, c.token)
    = (excluded.topic, excluded.message_id, excluded.half_id, excluded.token)
RETURNING id
"""

# Record the sent answer in the newest row of the question, which the index on the message's id finds. `id + 0` keeps PostgreSQL
# from scanning the primary key backwards instead.
RECORD_SENT = """
UPDATE outbox_check_back SET sent_answer = %s WHERE id = (
    SELECT id FROM outbox_check_back WHERE message_id = %s AND half_id = %s AND asked = %s ORDER BY id + 0 DESC LIMIT 1)
"""


logger = get_logger("outbox.check_back")


def answer(half: Half, *, asked_by: str, request_id: str = "", using: str = DEFAULT_DB_ALIAS) -> Answer:
    """
    Return the resolution of a half message, from the database that its token names.

    An error results in UNKNOWN, never in an exception; the broker then asks again.

    Args:
        asked_by: endpoint, broker, command or admin.
        request_id: the id of the request; a new id is created if it is empty.
        using: the database for half messages without a token.
    """
    started = time.perf_counter()
    try:
        with sources.connect(sources.alias_of(half.token, otherwise=using)) as connection:
            result = _answer(connection, half, request_id, asked_by, started)
    except Exception as error:
        result = _failed(half, error)
        logger.error(
            "The check-back about message %s could not be recorded: the database cannot be reached.",
            half.message_id,
            extra=fields_of(half),
        )
    _announce(half, result)
    return result


def answer_on(connection: Connection, half: Half, *, asked_by: str) -> Answer:
    """Answer on a given connection, inside its open transaction if it has one; everything else is as in `answer`."""
    result = _answer(connection, half, "", asked_by, time.perf_counter())
    _announce(half, result)
    return result


def record_sent(half: Half, resolution: Resolution, *, using: str = DEFAULT_DB_ALIAS) -> None:
    """
    Record that the broker was sent another answer than the decided one. This function never raises.

    Args:
        using: the database for half messages without a token.
    """
    try:
        with sources.connect(sources.alias_of(half.token, otherwise=using)) as connection:
            values = (resolution, half.message_id, half.half_id, half.asked)
            is_recorded = connection.execute(RECORD_SENT, values).rowcount > 0
    except Exception:
        is_recorded = False
        logger.exception(
            "The answer that the broker was sent about message %s could not be recorded.",
            half.message_id,
            extra=fields_of(half),
        )
    if is_recorded:
        logger.info(
            "The broker was sent %s about message %s instead of the decided answer.",
            resolution,
            half.message_id,
            extra=fields_of(half),
        )
    else:
        logger.warning(
            "The broker was sent %s about message %s instead of the decided answer, which could not be recorded.",
            resolution,
            half.message_id,
            extra=fields_of(half),
        )


def _answer(connection: Connection, half: Half, request_id: str, asked_by: str, started: float) -> Answer:
    """Decide the answer and record it; return UNKNOWN if the request id was used for another half message before."""
    try:
        result = resolve(connection, half)
    except Exception as error:
        result = _failed(half, error)
    request_id = request_id or str(uuid4())
    question = (request_id, asked_by, half.topic, half.message_id, half.half_id, half.token, half.asked)
    values = (*question, result.resolution, cut(result.reason), result.about, (time.perf_counter() - started) * 1000)
    try:
        is_recorded = connection.execute(RECORD, values).fetchone() is not None
    except Exception:
        logger.exception(
            "The check-back about message %s could not be recorded.",
            half.message_id,
            extra=fields_of(half),
        )
        return result
    if is_recorded:
        return result
    reason = f"The request id {request_id!r} was used for another half message before. Each question needs an id of its own."
    return Answer(UNKNOWN, reason, is_alert=True)


def _failed(half: Half, error: Exception) -> Answer:
    """Turn an error into UNKNOWN. The error's text is only logged, and not part of the answer: it may name hosts and tables."""
    if isinstance(error, psycopg.errors.LockNotAvailable | psycopg.errors.QueryCanceled):
        logger.warning(
            "The check-back about message %s timed out: %s",
            half.message_id,
            error,
            extra=fields_of(half),
        )
        return Answer(UNKNOWN, "The database did not answer in time.")
    logger.error(
        "The check-back about message %s failed.",
        half.message_id,
        exc_info=error,
        extra=fields_of(half),
    )
    return Answer(UNKNOWN, f"No answer could be read: {type(error).__name__}.")


def _announce(half: Half, result: Answer) -> None:
    signals.check_back_answered.send_robust(sender=CheckBack, half=half, answer=result)
    if result.is_alert:
        logger.error(
            "Check-back about message %s of topic %s: %s",
            half.message_id,
            half.topic,
            result.reason,
            extra=fields_of(half),
        )
        details = {name: value for name, value in asdict(half).items() if name not in ("headers", "body")}
        signals.alert.send_robust(sender=CheckBack, reason=result.reason, details=details)

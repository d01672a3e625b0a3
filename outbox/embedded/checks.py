"""
The check loop: ask about half messages that nobody ended.

An ask is counted and the next one set before the question is put, in one statement of its own: no transaction is open
while the answer is awaited, two loops never put the same question, and a loop that dies has still asked.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec

from outbox import signals
from outbox.database import Connection
from outbox.embedded.clock import NOW
from outbox.logs import get_logger
from outbox.message import Half, Resolution

logger = get_logger(__name__)

# Doubled with each ask, at most sixteen-fold: 10 s, 20 s, 40 s, 80 s, 160 s, 160 s ...
TAKE_DUE_HALVES = f"""
WITH due AS (
    SELECT id FROM outbox_embedded_half WHERE state = 0 AND ask_at <= {NOW} AND asked < %(check_limit)s
    ORDER BY ask_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
UPDATE outbox_embedded_half h
SET asked = h.asked + 1, ask_at = {NOW} + %(interval)s * power(2, least(h.asked, 4))
FROM due, outbox_embedded_topic t WHERE h.id = due.id AND t.id = h.topic_id
RETURNING t.name, h.message_id, h.id::text, h.token, h.asked, h.born_at, h.key, h.headers, h.body
"""

# Asked as often as allowed, and the time of the next ask has come.
PARK = f"""
UPDATE outbox_embedded_half h SET state = 1 FROM outbox_embedded_topic t
WHERE h.state = 0 AND h.ask_at <= {NOW} AND h.asked >= %(check_limit)s AND t.id = h.topic_id
RETURNING h.id, t.name, h.message_id, h.token, h.asked
"""

# An ask out of turn, counted; a parked half stays parked. No row comes back of a half that has ended.
TAKE_HALF = f"""
UPDATE outbox_embedded_half h SET asked = h.asked + 1, ask_at = {NOW} + %(interval)s
FROM outbox_embedded_topic t WHERE h.id = %(id)s AND h.state IN (0, 1) AND t.id = h.topic_id
RETURNING t.name, h.message_id, h.id::text, h.token, h.asked, h.born_at, h.key, h.headers, h.body
"""

ASK_AGAIN = f"UPDATE outbox_embedded_half SET state = 0, asked = 0, ask_at = {NOW} WHERE id = %(id)s AND state = 1"


def take_due(connection: Connection, *, limit: int, check_limit: int, interval: timedelta, now: datetime | None) -> list[Half]:
    """Return the half messages to be asked about now, this ask counted."""
    parameters = {"limit": limit, "check_limit": check_limit, "interval": interval, "now": now}
    rows = connection.execute(TAKE_DUE_HALVES, parameters).fetchall()
    return [_half(*row) for row in rows]


def take_one(connection: Connection, half_id: int, *, interval: timedelta, now: datetime | None) -> Half | None:
    """Return one half message to be asked about now, due or not, this ask counted; None where it has ended."""
    row = connection.execute(TAKE_HALF, {"id": half_id, "interval": interval, "now": now}).fetchone()
    return _half(*row) if row else None


def _half(
    topic: str, message_id: str, half_id: str, token: str, asked: int, born_at: datetime, key: str, headers: str, body: bytes
) -> Half:
    read = msgspec.json.decode(headers, type=dict[str, str])
    return Half(topic, message_id, half_id, token, asked, born_at, key, read, body)


def answer(ask: Callable[[Half], Resolution], half: Half) -> Resolution:
    """Put the question; whatever goes wrong, nothing is known."""
    try:
        return ask(half)
    except Exception:
        logger.exception("Asking about half message %s of topic %r failed.", half.half_id, half.topic)
        return Resolution.UNKNOWN


def park(connection: Connection, *, check_limit: int, now: datetime | None) -> int:
    """Stop asking about half messages that were asked about as often as allowed, and send an alert for each."""
    parked = connection.execute(PARK, {"check_limit": check_limit, "now": now}).fetchall()
    for half_id, topic, message_id, token, asked in parked:
        reason = f"Half message {half_id} of topic {topic!r} got no answer in {asked} asks and is parked."
        logger.error("%s Message %s, token %s. Have it asked again with ask_again().", reason, message_id, token)
        details = {"topic": topic, "half_id": str(half_id), "message_id": message_id, "token": token, "asked": asked}
        signals.alert.send_robust(sender=park, reason=reason, details=details)
    return len(parked)


def ask_again(connection: Connection, half_id: int, *, now: datetime | None) -> bool:
    """Ask about a parked half message again, counted from the first. False: it is not parked."""
    return connection.execute(ASK_AGAIN, {"id": half_id, "now": now}).rowcount == 1

"""
The check loop, which sends check-backs about half messages that were not ended (committed or rolled back).

Before a check-back is sent, one statement counts it and schedules the next one. So no transaction is open during the check-back,
two loops never send the same one, and it is counted even if its loop dies.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec

from outbox import signals
from outbox.database import Connection
from outbox.embedded.clock import NOW
from outbox.embedded.half_state import HalfState
from outbox.embedded.halves import ENDABLE_STATES
from outbox.logs import get_logger
from outbox.message import Half, Resolution

logger = get_logger(__name__)

# The interval doubles with each check-back, up to 16 times the first one: 10 s, 20 s, 40 s, 80 s, 160 s, 160 s ...
TAKE_DUE_HALVES = f"""
WITH due AS (
    SELECT id FROM outbox_embedded_half WHERE state = {HalfState.UNDECIDED} AND ask_at <= {NOW} AND asked < %(check_limit)s
    ORDER BY ask_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
UPDATE outbox_embedded_half h
SET asked = h.asked + 1, ask_at = {NOW} + %(interval)s * power(2, least(h.asked, 4))
FROM due, outbox_embedded_topic t WHERE h.id = due.id AND t.id = h.topic_id
RETURNING t.name, h.message_id, h.id::text, h.token, h.asked, h.born_at, h.key, h.headers, h.body
"""

# Parks half messages after the last of their check-backs, when another one would be due.
PARK = f"""
UPDATE outbox_embedded_half h SET state = {HalfState.PARKED} FROM outbox_embedded_topic t
WHERE h.state = {HalfState.UNDECIDED} AND h.ask_at <= {NOW} AND h.asked >= %(check_limit)s AND t.id = h.topic_id
RETURNING h.id, t.name, h.message_id, h.token, h.asked
"""

# Counts an extra check-back. A parked half message stays parked. Returns no row if the half message has ended.
TAKE_HALF = f"""
UPDATE outbox_embedded_half h SET asked = h.asked + 1, ask_at = {NOW} + %(interval)s
FROM outbox_embedded_topic t WHERE h.id = %(id)s AND h.state IN {ENDABLE_STATES} AND t.id = h.topic_id
RETURNING t.name, h.message_id, h.id::text, h.token, h.asked, h.born_at, h.key, h.headers, h.body
"""

ASK_AGAIN = f"""
UPDATE outbox_embedded_half SET state = {HalfState.UNDECIDED}, asked = 0, ask_at = {NOW}
WHERE id = %(id)s AND state = {HalfState.PARKED}
"""


def take_due(connection: Connection, *, limit: int, check_limit: int, interval: timedelta, now: datetime | None) -> list[Half]:
    """Count the check-backs that are due, and return their half messages."""
    parameters = {"limit": limit, "check_limit": check_limit, "interval": interval, "now": now}
    rows = connection.execute(TAKE_DUE_HALVES, parameters).fetchall()
    return [_half(*row) for row in rows]


def take_one(connection: Connection, half_id: int, *, interval: timedelta, now: datetime | None) -> Half | None:
    """Count a check-back about one half message, due or not, and return the half message; None if it has ended."""
    row = connection.execute(TAKE_HALF, {"id": half_id, "interval": interval, "now": now}).fetchone()
    return _half(*row) if row else None


def _half(
    topic: str, message_id: str, half_id: str, token: str, asked: int, born_at: datetime, key: str, headers: str, body: bytes
) -> Half:
    decoded_headers = msgspec.json.decode(headers, type=dict[str, str])
    return Half(topic, message_id, half_id, token, asked, born_at, key, decoded_headers, body)


def answer(ask: Callable[[Half], Resolution], half: Half) -> Resolution:
    """Return the answer of `ask`; UNKNOWN after an exception."""
    try:
        return ask(half)
    except Exception:
        logger.exception("The check-back about half message %s of topic %r failed.", half.half_id, half.topic)
        return Resolution.UNKNOWN


def park(connection: Connection, *, check_limit: int, now: datetime | None) -> int:
    """Park half messages whose check-backs have reached their limit, and send an alert for each. Return their number."""
    parked = connection.execute(PARK, {"check_limit": check_limit, "now": now}).fetchall()
    for half_id, topic, message_id, token, asked in parked:
        reason = f"Half message {half_id} of topic {topic!r} is parked: {asked} check-backs did not end it."
        logger.error("%s Message %s, token %s. Check back again in the admin, or with ask_again().", reason, message_id, token)
        details = {"topic": topic, "half_id": str(half_id), "message_id": message_id, "token": token, "asked": asked}
        signals.alert.send_robust(sender=park, reason=reason, details=details)
    return len(parked)


def ask_again(connection: Connection, half_id: int, *, now: datetime | None) -> bool:
    """Resume check-backs about a parked half message, and count them from zero. Return False if it is not parked."""
    return connection.execute(ASK_AGAIN, {"id": half_id, "now": now}).rowcount == 1

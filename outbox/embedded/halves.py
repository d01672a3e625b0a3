"""
Half messages, which are stored hidden from consumers, and then ended once. To end one is to commit it or to roll it back.

The first end wins. It deletes (commit) or changes (rollback) the row of the half message, so that a second end finds no row. The
end is known as long as the message or the changed row is kept, because a visible message has the id of its half message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import psycopg

from outbox.brokers.base import Ended, HalfRef, HalfStatus, SendResult, SendStatus
from outbox.database import Connection
from outbox.embedded.clock import NOW
from outbox.embedded.half_state import HalfState
from outbox.embedded.log import NOTIFY_QUEUE, SHOW
from outbox.embedded.rows import MESSAGE_ARRAYS, MESSAGE_COLUMNS, EmbeddedRow, arrays
from outbox.message import Resolution

HALF_COLUMNS = ", ".join(f"h.{column}" for column in MESSAGE_COLUMNS.split(", "))

ENDABLE_STATES = f"({HalfState.UNDECIDED}, {HalfState.PARKED})"
"""The states in which a half message can be ended, in SQL."""

NEW_ID = "SELECT nextval('outbox_embedded_half_id')::text"

# New ids are taken from the sequence before the INSERT, so that they are returned in the order of the messages.
STORE_HALVES = f"""
WITH given AS MATERIALIZED (
    SELECT coalesce(given_id, nextval('outbox_embedded_half_id')) AS id, m.*
    FROM unnest({MESSAGE_ARRAYS}, %(tokens)b::text[], %(given_ids)b::bigint[]) WITH ORDINALITY
        AS m ({MESSAGE_COLUMNS}, token, given_id, n)
),
stored AS (
    INSERT INTO outbox_embedded_half (id, {MESSAGE_COLUMNS}, token, born_at, ask_at)
    SELECT id, {MESSAGE_COLUMNS}, token, {NOW}, {NOW} + %(check_after)s FROM given
)
SELECT array_agg(id ORDER BY n) FROM given
"""

# References to half messages. The id alone does not identify a half message, because after a restore the database assigns it to
# another one, and another broker may use the same id.
GIVEN = "unnest(%(ids)b::bigint[], %(message_ids)b::text[], %(sources)b::text[]) AS g (id, message_id, source)"
IS_GIVEN = "h.id = g.id AND h.message_id = g.message_id AND g.source IN ('', h.source)"

# If another half message has made the message visible already, the message is not stored twice. The row of this half message is
# then inserted again, with the state COMMITTED and without its body.
COMMIT_HALVES = f"""
WITH leaving AS (
    DELETE FROM outbox_embedded_half h USING {GIVEN} WHERE {IS_GIVEN} AND h.state IN {ENDABLE_STATES}
    RETURNING h.id AS n, h.id AS half_id, {HALF_COLUMNS}, h.token, h.born_at
),
{SHOW},
repeated AS (
    INSERT INTO outbox_embedded_half (id, {MESSAGE_COLUMNS}, token, born_at, ask_at, state, ended_at)
    SELECT n, topic_id, queue, message_id, source, key, tag, headers, '', token, born_at, {NOW}, {HalfState.COMMITTED}, {NOW}
    FROM leaving WHERE n NOT IN (SELECT half_id FROM shown)
)
SELECT array_agg(n), (SELECT count({NOTIFY_QUEUE}) FROM numbered) FROM leaving
"""

ROLL_BACK_HALVES = f"""
WITH rolled_back AS (
    UPDATE outbox_embedded_half h SET state = {HalfState.ROLLED_BACK}, body = '', ended_at = {NOW}
    FROM {GIVEN} WHERE {IS_GIVEN} AND h.state IN {ENDABLE_STATES} RETURNING h.id
)
SELECT array_agg(id) FROM rolled_back
"""

# This is a separate statement, because only a later snapshot sees an end by another process whose row lock the first statement
# waited for.
READ_ENDS = f"""
SELECT h.id, h.state FROM {GIVEN} JOIN outbox_embedded_half h ON {IS_GIVEN}
UNION ALL
SELECT m.half_id, {HalfState.COMMITTED} FROM {GIVEN} JOIN outbox_embedded_message m
ON m.half_id = g.id AND m.message_id = g.message_id AND g.source IN ('', m.source)
"""

# Returns whether the message is visible, whichever half message made it so; the state of the half message; the current time.
LOOK_UP = f"""
SELECT EXISTS (
    SELECT FROM outbox_embedded_message m WHERE m.message_id = g.message_id AND g.source IN ('', m.source)
), h.state, {NOW}
FROM unnest(%(ids)b::bigint[], %(message_ids)b::text[], %(sources)b::text[]) WITH ORDINALITY AS g (id, message_id, source, n)
LEFT JOIN outbox_embedded_half h ON {IS_GIVEN}
ORDER BY g.n
"""

ENDS = {HalfState.COMMITTED: Ended.COMMITTED, HalfState.ROLLED_BACK: Ended.ROLLED_BACK}

CLOCK_DIFFERENCE = timedelta(minutes=1)  # the assumed maximum between the deciding database's clock and the broker's


def new_id(connection: Connection) -> str:
    """Return a new id for a half message that is stored later."""
    [(half_id,)] = connection.execute(NEW_ID).fetchall()
    return str(half_id)


def store(
    connection: Connection,
    rows: Sequence[EmbeddedRow],
    tokens: Sequence[str],
    given_ids: Sequence[str],
    *,
    check_after: timedelta,
    now: datetime | None,
) -> list[int]:
    """Store half messages. Return their ids in the order of the rows. An empty given id is replaced with a new one."""
    parameters = {
        **arrays(rows),
        "tokens": list(tokens),
        "given_ids": [int(given) if given else None for given in given_ids],
        "check_after": check_after,
        "now": now,
    }
    return _ids_of(connection.execute(STORE_HALVES, parameters))


def end(connection: Connection, halves: Sequence[HalfRef], resolution: Resolution, *, now: datetime | None) -> list[SendResult]:
    """Commit or roll back half messages. The results contain the first end of each, by this call or an earlier one."""
    named = {(half.half_id, half.message_id, half.source) for half in halves}
    given = _given(halves)
    ids = given["ids"]
    if len(named) > len(set(ids)):  # two references share an id, so one call could not tell their ends apart
        return [result for half in halves for result in end(connection, [half], resolution, now=now)]
    statement = COMMIT_HALVES if resolution is Resolution.COMMIT else ROLL_BACK_HALVES
    taken = _ids_of(connection.execute(statement, {**given, "now": now}))
    ended = dict.fromkeys(taken, Ended.COMMITTED if resolution is Resolution.COMMIT else Ended.ROLLED_BACK)
    if len(ended) < len(set(ids)):
        others = [half for half, half_id in zip(halves, ids, strict=True) if half_id not in ended]
        rows = connection.execute(READ_ENDS, _given(others))
        ended |= {half_id: ENDS[HalfState(state)] for half_id, state in rows if state in ENDS}
    return [
        SendResult(SendStatus.ACCEPTED, half_id=half.half_id, ended=ended.get(half_id, Ended.NOT_FOUND))
        for half, half_id in zip(halves, ids, strict=True)
    ]


def look_up(
    connection: Connection, halves: Sequence[HalfRef], retention: Mapping[str, timedelta], *, now: datetime | None
) -> list[HalfStatus]:
    """
    Return the statuses of half messages.

    Args:
        retention: topic -> the minimum time for which its messages are kept.
    """
    rows = connection.execute(LOOK_UP, {**_given(halves), "now": now})
    return [
        _status(is_visible, state, proves_absence=_is_kept(half, retention, time))
        for half, (is_visible, state, time) in zip(halves, rows, strict=True)
    ]


def _status(is_visible: bool, state: int | None, *, proves_absence: bool) -> HalfStatus:
    if is_visible or state == HalfState.COMMITTED:
        return HalfStatus.VISIBLE
    if state is None:
        return HalfStatus.GONE if proves_absence else HalfStatus.UNPROVEN
    return HalfStatus.GONE if state == HalfState.ROLLED_BACK else HalfStatus.HIDDEN


def _is_kept(half: HalfRef, retention: Mapping[str, timedelta], now: datetime) -> bool:
    """Return whether the message would certainly still be kept if its half message had been committed."""
    if half.decided_at is None or half.topic not in retention:
        return False
    return half.decided_at > now - retention[half.topic] + CLOCK_DIFFERENCE


def _given(halves: Sequence[HalfRef]) -> dict[str, list[Any]]:
    return {
        "ids": [_number(half.half_id) for half in halves],
        "message_ids": [half.message_id for half in halves],
        "sources": [half.source for half in halves],
    }


def _ids_of(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[int]:
    row = cursor.fetchone()
    return list(row[0] or ()) if row else []


def _number(half_id: str) -> int:
    """Return a half message's id as a number. For text that cannot be an id of this broker, return 0, which is never an id."""
    return int(half_id) if half_id.isascii() and half_id.isdecimal() and len(half_id) < 19 else 0

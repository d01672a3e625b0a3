"""
Half messages: stored hidden, then ended once.

The first end wins: it deletes (commit) or changes (rollback) the half's row, and a second finds no row to take. What
became of the half is remembered for as long as its message is: the visible message names its half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import psycopg

from outbox.brokers.base import Ended, HalfRef, HalfStatus, SendResult, SendStatus
from outbox.database import Connection
from outbox.embedded.clock import NOW
from outbox.embedded.log import NOTIFY_QUEUE, SHOW
from outbox.embedded.rows import MESSAGE_ARRAYS, MESSAGE_COLUMNS, MessageRow, arrays
from outbox.message import Resolution

HALF_COLUMNS = ", ".join(f"h.{column}" for column in MESSAGE_COLUMNS.split(", "))

NEW_ID = "SELECT nextval('outbox_embedded_half_id')::text"

# Ids not given are drawn before the INSERT, so that they come back in the order of the messages.
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

# The half messages that are named. A number alone names none: a database that was restored draws it again for another half,
# and another broker has drawn it for its own.
GIVEN = "unnest(%(ids)b::bigint[], %(message_ids)b::text[], %(sources)b::text[]) AS g (id, message_id, source)"
IS_GIVEN = "h.id = g.id AND h.message_id = g.message_id AND g.source IN ('', h.source)"

# A half whose message is visible already, by another half of it, is not shown again: its row stays, as committed.
COMMIT_HALVES = f"""
WITH leaving AS (
    DELETE FROM outbox_embedded_half h USING {GIVEN} WHERE {IS_GIVEN} AND h.state IN (0, 1)
    RETURNING h.id AS n, h.id AS half_id, {HALF_COLUMNS}, h.token, h.born_at
),
{SHOW},
repeated AS (
    INSERT INTO outbox_embedded_half (id, {MESSAGE_COLUMNS}, token, born_at, ask_at, state, ended_at)
    SELECT n, topic_id, queue, message_id, source, key, tag, headers, '', token, born_at, {NOW}, 2, {NOW}
    FROM leaving WHERE n NOT IN (SELECT half_id FROM shown)
)
SELECT array_agg(n), (SELECT count({NOTIFY_QUEUE}) FROM numbered) FROM leaving
"""

ROLL_BACK_HALVES = f"""
WITH gone AS (
    UPDATE outbox_embedded_half h SET state = 3, body = '', ended_at = {NOW}
    FROM {GIVEN} WHERE {IS_GIVEN} AND h.state IN (0, 1) RETURNING h.id
)
SELECT array_agg(id) FROM gone
"""

# Its own statement: a half that another end took while we waited for its row is seen by a later snapshot only.
READ_ENDS = f"""
SELECT h.id, h.state FROM {GIVEN} JOIN outbox_embedded_half h ON {IS_GIVEN}
UNION ALL
SELECT h.half_id, 2 FROM {GIVEN} JOIN outbox_embedded_message h
ON h.half_id = g.id AND h.message_id = g.message_id AND g.source IN ('', h.source)
"""

# A message that is visible by whatever half of it; one that waits for its time is, too. Of a half, how it stands.
LOOK_UP = f"""
SELECT EXISTS (
    SELECT FROM outbox_embedded_message m WHERE m.message_id = g.message_id AND g.source IN ('', m.source)
) OR EXISTS (
    SELECT FROM outbox_embedded_topic t JOIN outbox_embedded_delayed d ON d.topic_id = t.id
    WHERE t.name = g.topic AND d.message_id = g.message_id AND g.source IN ('', d.source)
), h.state, {NOW}
FROM unnest(%(ids)b::bigint[], %(message_ids)b::text[], %(sources)b::text[], %(topics)b::text[]) WITH ORDINALITY
    AS g (id, message_id, source, topic, n)
LEFT JOIN outbox_embedded_half h ON {IS_GIVEN}
ORDER BY g.n
"""

COMMITTED, ROLLED_BACK = 2, 3  # as models.HalfState has them
ENDS = {COMMITTED: Ended.COMMITTED, ROLLED_BACK: Ended.ROLLED_BACK}

CLOCK_DIFFERENCE = timedelta(minutes=1)  # the clock that decided is another than the broker's


def new_id(connection: Connection) -> str:
    """Draw the id of a half message that is yet to be stored."""
    row = connection.execute(NEW_ID).fetchone()
    assert row is not None
    return str(row[0])


def store(
    connection: Connection,
    rows: Sequence[MessageRow],
    tokens: Sequence[str],
    given_ids: Sequence[str],
    *,
    check_after: timedelta,
    now: datetime | None,
) -> list[int]:
    """Store half messages; return their ids, in the order of the rows: the one given, or a new one for ""."""
    parameters = {
        **arrays(rows),
        "tokens": list(tokens),
        "given_ids": [int(given) if given else None for given in given_ids],
        "check_after": check_after,
        "now": now,
    }
    return _first(connection.execute(STORE_HALVES, parameters))


def end(connection: Connection, halves: Sequence[HalfRef], resolution: Resolution, *, now: datetime | None) -> list[SendResult]:
    """Commit or roll back; the outcomes say how each half stands now, whoever ended it."""
    named = {(half.half_id, half.message_id, half.source) for half in halves}
    given = _given(halves)
    ids = given["ids"]
    if len(named) > len(set(ids)):  # one number names two: its end would be read as that of the other
        return [result for half in halves for result in end(connection, [half], resolution, now=now)]
    statement = COMMIT_HALVES if resolution is Resolution.COMMIT else ROLL_BACK_HALVES
    taken = _first(connection.execute(statement, {**given, "now": now}))
    ended = dict.fromkeys(taken, Ended.COMMITTED if resolution is Resolution.COMMIT else Ended.ROLLED_BACK)
    if len(ended) < len(set(ids)):
        ended |= _read_ends(connection, [half for half, number in zip(halves, ids, strict=True) if number not in ended])
    return [
        SendResult(SendStatus.ACCEPTED, half_id=half.half_id, ended=ended.get(half_id, Ended.NOT_FOUND))
        for half, half_id in zip(halves, ids, strict=True)
    ]


def _read_ends(connection: Connection, halves: Sequence[HalfRef]) -> dict[int, Ended]:
    return {half_id: ENDS[state] for half_id, state in connection.execute(READ_ENDS, _given(halves)) if state in ENDS}


def look_up(
    connection: Connection, halves: Sequence[HalfRef], retention: Mapping[str, timedelta], *, now: datetime | None
) -> list[HalfStatus]:
    """
    Return where half messages stand.

    Args:
        retention: topic -> how long its messages are kept at least.
    """
    rows = connection.execute(LOOK_UP, {**_given(halves), "topics": [half.topic for half in halves], "now": now})
    return [
        _status(is_visible, state, proves_absence=_is_kept(half, retention, time))
        for half, (is_visible, state, time) in zip(halves, rows, strict=True)
    ]


def _status(is_visible: bool, state: int | None, *, proves_absence: bool) -> HalfStatus:
    if is_visible or state == COMMITTED:
        return HalfStatus.VISIBLE
    if state is None:
        return HalfStatus.GONE if proves_absence else HalfStatus.UNPROVEN
    return HalfStatus.GONE if state == ROLLED_BACK else HalfStatus.HIDDEN


def _is_kept(half: HalfRef, retention: Mapping[str, timedelta], now: datetime) -> bool:
    """Return whether a message of that half, once visible, would still be there for sure."""
    if half.decided_at is None or half.topic not in retention:
        return False
    return half.decided_at > now - retention[half.topic] + CLOCK_DIFFERENCE


def _given(halves: Sequence[HalfRef]) -> dict[str, list[Any]]:
    return {
        "ids": [_number(half.half_id) for half in halves],
        "message_ids": [half.message_id for half in halves],
        "sources": [half.source for half in halves],
    }


def _first(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[int]:
    row = cursor.fetchone()
    return list(row[0] or ()) if row else []


def _number(half_id: str) -> int:
    """Read a half's id; what is none of ours gives 0, which no half has."""
    return int(half_id) if half_id.isascii() and half_id.isdecimal() and len(half_id) < 19 else 0

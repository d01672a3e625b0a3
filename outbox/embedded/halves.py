"""
Half messages: stored hidden, then ended once.

The first end wins: it deletes (commit) or changes (rollback) the half's row, and a second finds no row to take. What
became of the half is remembered for as long as its message is: the visible message names its half.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import psycopg

from outbox.brokers.base import Ended, HalfRef, SendResult, SendStatus
from outbox.database import Connection
from outbox.embedded.clock import NOW
from outbox.embedded.log import NOTIFY, SHOW
from outbox.embedded.rows import MESSAGE_ARRAYS, MESSAGE_COLUMNS, MessageRow, arrays
from outbox.message import Resolution

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

# A half whose message is visible already, by another half of it, is not shown again: its row stays, as committed.
COMMIT_HALVES = f"""
WITH leaving AS (
    DELETE FROM outbox_embedded_half WHERE id = ANY(%(ids)s) AND state IN (0, 1)
    RETURNING id AS n, id AS half_id, {MESSAGE_COLUMNS}, token, born_at
),
{SHOW},
repeated AS (
    INSERT INTO outbox_embedded_half (id, {MESSAGE_COLUMNS}, token, born_at, ask_at, state, ended_at)
    SELECT n, topic_id, queue, message_id, source, key, tag, headers, '', token, born_at, {NOW}, 2, {NOW}
    FROM leaving WHERE n NOT IN (SELECT half_id FROM shown)
)
SELECT array_agg(n), {NOTIFY} FROM leaving
"""

ROLL_BACK_HALVES = f"""
WITH gone AS (
    UPDATE outbox_embedded_half SET state = 3, body = '', ended_at = {NOW}
    WHERE id = ANY(%(ids)s) AND state IN (0, 1) RETURNING id
)
SELECT array_agg(id) FROM gone
"""

# Its own statement: a half that another end took while we waited for its row is seen by a later snapshot only.
READ_ENDS = """
SELECT id, state FROM outbox_embedded_half WHERE id = ANY(%(ids)s)
UNION ALL
SELECT half_id, 2 FROM outbox_embedded_message WHERE message_id = ANY(%(message_ids)s) AND half_id = ANY(%(ids)s)
"""

ENDS = {2: Ended.COMMITTED, 3: Ended.ROLLED_BACK}


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
    """Store half messages; give their ids, in the order of the rows: the one given, or a new one for ""."""
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
    ids = [_number(half.half_id) for half in halves]
    statement = COMMIT_HALVES if resolution is Resolution.COMMIT else ROLL_BACK_HALVES
    taken = _first(connection.execute(statement, {"ids": [half_id for half_id in ids if half_id], "now": now}))
    ended = dict.fromkeys(taken, Ended.COMMITTED if resolution is Resolution.COMMIT else Ended.ROLLED_BACK)
    if len(ended) < len(set(ids)):
        ended |= _read_ends(connection, [half for half, number in zip(halves, ids, strict=True) if number not in ended])
    return [
        SendResult(SendStatus.ACCEPTED, half_id=half.half_id, ended=ended.get(half_id, Ended.NOT_FOUND))
        for half, half_id in zip(halves, ids, strict=True)
    ]


def _read_ends(connection: Connection, halves: Sequence[HalfRef]) -> dict[int, Ended]:
    parameters = {
        "ids": [_number(half.half_id) for half in halves],
        "message_ids": [half.message_id for half in halves],
    }
    return {half_id: ENDS[state] for half_id, state in connection.execute(READ_ENDS, parameters) if state in ENDS}


def _first(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[int]:
    row = cursor.fetchone()
    return list(row[0] or ()) if row else []


def _number(half_id: str) -> int:
    """Read a half's id; what is none of ours gives 0, which no half has."""
    return int(half_id) if half_id.isascii() and half_id.isdecimal() and len(half_id) < 19 else 0

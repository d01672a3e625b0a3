"""Counts of messages published and handled in the last hour, by minute. At most `ROW_LIMIT` rows are read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outbox.database import Connection

MINUTES = 60
ROW_LIMIT = 50_000

# The newest messages by the time in their ids (uuid7), by the primary key.
PUBLISHED = """
SELECT least(%(last)s, (('x' || translate(left(id::text, 13), '-', ''))::bit(48)::bigint - %(start)s) / 60000)::int, count(*)
FROM (SELECT id FROM outbox_message WHERE id >= %(first_id)s ORDER BY id DESC LIMIT %(limit)s) newest
GROUP BY 1 ORDER BY 1
"""

# The newest inbox rows, by the index of their times. A message counts once for each group.
HANDLED = """
SELECT least(%(last)s, floor(extract(epoch FROM handled_at - %(begin)s) / 60))::int, count(*)
FROM (SELECT handled_at FROM outbox_inbox WHERE handled_at >= %(begin)s ORDER BY handled_at DESC LIMIT %(limit)s) newest
GROUP BY 1 ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Minute:
    """Messages published and handled in the minute from `begins_at` on; None: the minute is before the rows that were read."""

    begins_at: datetime
    published: int | None
    handled: int | None


def read_throughput(connection: Connection, *, now: datetime) -> list[Minute]:
    """Return the counts of the last hour by minute, oldest first."""
    begin = now - timedelta(minutes=MINUTES)
    start = int(begin.timestamp() * 1000)
    arguments = {"begin": begin, "start": start, "first_id": UUID(int=start << 80), "last": MINUTES - 1, "limit": ROW_LIMIT}
    published = _by_minute(connection.execute(PUBLISHED, arguments).fetchall())
    handled = _by_minute(connection.execute(HANDLED, arguments).fetchall())
    return [Minute(begin + timedelta(minutes=n), published[n], handled[n]) for n in range(MINUTES)]


def _by_minute(counts: list[tuple[Any, ...]]) -> list[int | None]:
    """Return one count per minute; None for the oldest minute that the limit has cut, and for those before it."""
    known = dict(counts)
    cut_at = min(known) if sum(known.values()) >= ROW_LIMIT else -1
    return [known.get(minute, 0) if minute > cut_at else None for minute in range(MINUTES)]

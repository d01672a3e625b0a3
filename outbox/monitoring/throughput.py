"""How many messages were published and handled of late, minute by minute; no more rows are looked at than `LOOKED_AT`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outbox.database import Connection

MINUTES = 60
LOOKED_AT = 50_000

# The newest messages by the time in their ids (uuid7), along the primary key.
PUBLISHED = """
SELECT least(%(last)s, (('x' || translate(left(id::text, 13), '-', ''))::bit(48)::bigint - %(start)s) / 60000)::int, count(*)
FROM (SELECT id FROM outbox_message WHERE id >= %(first_id)s ORDER BY id DESC LIMIT %(limit)s) newest
GROUP BY 1 ORDER BY 1
"""

# The newest inbox rows, along the index of their times. A message counts once for each group.
HANDLED = """
SELECT least(%(last)s, floor(extract(epoch FROM handled_at - %(begin)s) / 60))::int, count(*)
FROM (SELECT handled_at FROM outbox_inbox WHERE handled_at >= %(begin)s ORDER BY handled_at DESC LIMIT %(limit)s) newest
GROUP BY 1 ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Minute:
    """What happened in the minute from `begins_at` on. None: it lies behind the rows that were looked at."""

    begins_at: datetime
    published: int | None
    handled: int | None


def read_flow(connection: Connection, *, now: datetime) -> list[Minute]:
    """Count the last hour's messages, oldest minute first."""
    begin = now - timedelta(minutes=MINUTES)
    start = int(begin.timestamp() * 1000)
    arguments = {"begin": begin, "start": start, "first_id": UUID(int=start << 80), "last": MINUTES - 1, "limit": LOOKED_AT}
    published = _spread(connection.execute(PUBLISHED, arguments).fetchall())
    handled = _spread(connection.execute(HANDLED, arguments).fetchall())
    return [Minute(begin + timedelta(minutes=n), published[n], handled[n]) for n in range(MINUTES)]


def _spread(counts: list[tuple[Any, ...]]) -> list[int | None]:
    """Lay counts out by minute; where the limit cut them off, the oldest minute is not whole and nothing is known before."""
    known = dict(counts)
    cut_at = min(known) if sum(known.values()) >= LOOKED_AT else -1
    return [known.get(minute, 0) if minute > cut_at else None for minute in range(MINUTES)]

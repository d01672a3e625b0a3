"""
Ids of messages and topics.

That of a message is a uuid7, whose first 48 bits are the milliseconds since 1970. That of a topic follows from its name, so that
processes and tables cannot differ about it, whatever was emptied, restored or loaded meanwhile.
"""

from __future__ import annotations

import hashlib
import uuid
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from uuid import UUID

if hasattr(uuid, "uuid7"):  # Python 3.14 and later
    uuid7 = uuid.uuid7
else:
    from uuid_utils.compat import uuid7

__all__ = ["day_at", "day_of", "first_id", "first_id_at", "made_at", "midnight", "published_at", "topic_number", "uuid7"]

LAST_DAY = date(9999, 12, 30)  # the day after it is still a date

MILLISECONDS = [f".{number:03d}Z" for number in range(1000)]  # how each of them ends a time


@lru_cache(maxsize=4096)
def topic_number(name: str) -> int:
    """Return the id of a topic: 31 bits of a hash of its name. The tables of topics check it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) & 0x7FFFFFFF


def first_id_at(moment: datetime) -> UUID:
    """Return the smallest id of a time; before 1970, the smallest of all."""
    return UUID(int=max(0, int(moment.timestamp() * 1000)) << 80)


def day_at(moment: datetime) -> date:
    """Return the UTC day of a time."""
    return moment.astimezone(UTC).date()


def midnight(day: date) -> datetime:
    """Return the time at which a UTC day begins."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def first_id(day: date) -> UUID:
    """Return the smallest id of a UTC day; with the next day's it bounds the day's partition."""
    return first_id_at(midnight(day))


def day_of(message_id: UUID) -> date:
    """Return the UTC day an id was made on; the last of all days for an id that holds no date."""
    return day_at(made_at(message_id))


def made_at(message_id: UUID) -> datetime:
    """Return the time an id was made at, to the millisecond; `LAST_DAY` for an id that holds no time."""
    last = timedelta(days=LAST_DAY.toordinal() - date(1970, 1, 1).toordinal())
    return datetime(1970, 1, 1, tzinfo=UTC) + min(timedelta(milliseconds=message_id.int >> 80), last)


def published_at(message_id: str) -> str:
    """Return the time in an id, to the millisecond, as RFC 3339 writes it."""
    seconds, milliseconds = divmod(int(message_id[:13].replace("-", ""), 16), 1000)
    return _second(seconds) + MILLISECONDS[milliseconds]


@lru_cache(maxsize=16)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")

"""
Ids of messages and topics.

A message's id is a uuid7, whose first 48 bits are the milliseconds since 1970. A topic's id is a hash of its name, so that all
processes and tables have the same id for a topic, even if tables were emptied, restored or loaded.
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

LAST_DAY = date(9999, 12, 30)  # one day before the maximum, because partitions need the next day, too

MILLISECONDS = [f".{number:03d}Z" for number in range(1000)]  # the end of a time in RFC 3339, for each number of milliseconds


@lru_cache(maxsize=4096)
def topic_number(name: str) -> int:
    """Return the id of a topic: 31 bits of a hash of its name. A constraint of the topic tables checks it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) & 0x7FFFFFFF


def first_id_at(time: datetime) -> UUID:
    """Return the smallest id of a time; for a time before 1970, the smallest id of all."""
    return UUID(int=max(0, int(time.timestamp() * 1000)) << 80)


def day_at(time: datetime) -> date:
    """Return the UTC day of a time."""
    return time.astimezone(UTC).date()


def midnight(day: date) -> datetime:
    """Return the time at which a UTC day begins."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def first_id(day: date) -> UUID:
    """Return the smallest id of a UTC day. This id and that of the next day are the bounds of the day's partition."""
    return first_id_at(midnight(day))


def day_of(message_id: UUID) -> date:
    """Return the UTC day of the time in an id; `LAST_DAY` if the id contains no valid time."""
    return day_at(made_at(message_id))


def made_at(message_id: UUID) -> datetime:
    """Return the time in an id, to the millisecond; midnight of `LAST_DAY` if the id contains no valid time."""
    last = timedelta(days=LAST_DAY.toordinal() - date(1970, 1, 1).toordinal())
    return datetime(1970, 1, 1, tzinfo=UTC) + min(timedelta(milliseconds=message_id.int >> 80), last)


def published_at(message_id: str) -> str:
    """Return the time in an id, to the millisecond, in the format of RFC 3339."""
    seconds, milliseconds = divmod(int(message_id[:13].replace("-", ""), 16), 1000)
    return _second(seconds) + MILLISECONDS[milliseconds]


@lru_cache(maxsize=16)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")

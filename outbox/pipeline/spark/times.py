"""The time in a uuid7. Its first 48 bits are milliseconds, so ids sort by time."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID


def first_id_at(time: datetime) -> str:
    """Return the smallest uuid7 of that time, as text."""
    return str(UUID(int=int(time.timestamp() * 1000) << 80))

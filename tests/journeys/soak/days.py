"""Days that last a minute, so that a soak drops the partitions of some. Import it before the modules that use days."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from outbox import ids
from tests.journeys.soak.given import DAY, FIRST_DAY, given

BEGAN_AT = datetime.fromtimestamp(given["began_at"], UTC)


def day_at(moment: datetime) -> date:
    return FIRST_DAY + timedelta(days=(moment - BEGAN_AT) // DAY)


def midnight(day: date) -> datetime:
    return BEGAN_AT + DAY * (day - FIRST_DAY).days


ids.day_at, ids.midnight = day_at, midnight

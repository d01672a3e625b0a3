"""The time in a uuid7: its first 48 bits are milliseconds, so ids sort as their times do."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from pyspark.sql import Column


def first_id_at(time: datetime) -> str:
    """Give the smallest uuid7 of that time, as text."""
    return str(UUID(int=int(time.timestamp() * 1000) << 80))


def published_micros(message_id: Column) -> Column:
    """Read the time of publishing out of a message id, in microseconds; NULL where it is no uuid7."""
    from pyspark.sql import functions as F

    digits = F.concat(message_id.substr(1, 8), message_id.substr(10, 4))
    return F.when(message_id.substr(15, 1) == "7", F.conv(digits, 16, 10).cast("bigint") * 1000)

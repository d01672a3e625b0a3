"""Times beside now."""

from datetime import UTC, datetime, timedelta


def ago(**time: float) -> datetime:
    return datetime.now(UTC) - timedelta(**time)

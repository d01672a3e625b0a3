"""Times and lengths of time in the arguments of commands."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_AGO = re.compile(r"(\d+)([mhd])")
_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


def time(text: str) -> datetime:
    """
    Parse a time: an age (`30m`, `2h`, `7d`), or ISO 8601, which is taken as UTC if it has no time zone.

    Raises:
        ValueError: the text is neither.
    """
    if ago := _AGO.fullmatch(text):
        try:
            return datetime.now(UTC) - int(ago[1]) * _UNITS[ago[2]]
        except OverflowError as error:
            raise ValueError(text) from error
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def seconds(text: str) -> float:
    """
    Parse a length of time in seconds.

    Raises:
        ValueError: the text is not a number, or it is negative, or longer than the time since 1970.
    """
    length = float(text)
    if not 0 <= length <= datetime.now(UTC).timestamp():  # false for nan, too
        raise ValueError(text)
    return length

"""The format of `OUTBOX["CHECK_BACK"]["THROTTLE"]`: the number of answers that are allowed in a period of time."""

from __future__ import annotations

import re

from outbox.errors import ConfigurationError

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def read_rate(rate: str) -> tuple[int, int]:
    """
    Parse a rate such as `600/s`, `600/min` or `600/10s`; REST framework does not know the last form.

    Returns:
        The number of answers, and the length of the period in seconds.

    Raises:
        ConfigurationError: the rate has another format.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)?([smhd])[a-z]*", rate)
    if match is None:
        raise ConfigurationError(
            f'OUTBOX["CHECK_BACK"]["THROTTLE"] is {rate!r}.', hint='Write a number and a time: "600/s", "1000/min", "50/10s".'
        )
    count, factor, unit = match.groups()
    return int(count), int(factor or 1) * SECONDS[unit]

"""How many answers the endpoint gives in a time."""

from __future__ import annotations

import re

from rest_framework.request import Request
from rest_framework.throttling import SimpleRateThrottle
from rest_framework.views import APIView

from outbox import conf
from outbox.errors import ConfigurationError

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class CheckBackThrottle(SimpleRateThrottle):
    """
    Refuses what goes beyond `OUTBOX["CHECK_BACK"]["THROTTLE"]`; the broker reads that as UNKNOWN and asks later.

    It counts in Django's default cache: over all processes where they share one, in each process where it is local
    memory. It stands behind the signature, so that nobody else can use the broker's share up.
    """

    def get_rate(self) -> str:
        return conf.settings().check_back.throttle

    def parse_rate(self, rate: str | None) -> tuple[int, int]:
        """Read `600/s`, `600/min`, or, beyond REST framework's own, `600/10s`."""
        found = re.fullmatch(r"(\d+)/(\d*)([smhd])[a-z]*", rate or "")
        if found is None:
            raise ConfigurationError(
                f'OUTBOX["CHECK_BACK"]["THROTTLE"] is {rate!r}. Write a number and a time: "600/s", "1000/min", "50/10s".'
            )
        count, factor, unit = found.groups()
        return int(count), int(factor or 1) * SECONDS[unit]

    def get_cache_key(self, request: Request, view: APIView) -> str:
        return "outbox-check-back-throttle"

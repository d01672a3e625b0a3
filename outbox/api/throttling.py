"""How many answers the endpoint gives in a time."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.throttling import SimpleRateThrottle
from rest_framework.views import APIView

from outbox import conf
from outbox.check_backs.rate import read_rate


class CheckBackThrottle(SimpleRateThrottle):
    """
    Refuses what goes beyond `OUTBOX["CHECK_BACK"]["THROTTLE"]`; the broker reads that as UNKNOWN and asks later.

    It counts in Django's default cache: over all processes where they share one, in each process where it is local
    memory. It stands behind the signature, so that nobody else can use the broker's share up.
    """

    def get_rate(self) -> str:
        return conf.settings().check_back.throttle

    def parse_rate(self, rate: str | None) -> tuple[int, int]:
        return read_rate(rate or "")

    def get_cache_key(self, request: Request, view: APIView) -> str:
        return "outbox-check-back-throttle"

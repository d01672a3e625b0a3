"""The throttle of the check-back endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from rest_framework.request import Request
from rest_framework.throttling import SimpleRateThrottle
from rest_framework.views import APIView

from outbox import conf
from outbox.api.authentication import TOLERANCE
from outbox.check_backs.rate import read_rate
from outbox.forks import ForkSafeLock

REPEATS = 10
REMEMBERED = 10_000


class Repeats:
    """
    Counts requests by their id: of the latest ones in this process, for as long as their signatures are valid.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # id -> when it expires, how often it came; oldest first
        self._lock = ForkSafeLock()

    def count(self, request_id: str, *, within: timedelta) -> int:
        """Count a request; return how often it has come, including this time."""
        with self._lock.current:
            now = self._clock()
            until, count = self._seen.get(request_id, (0.0, 0))
            if until <= now:
                self._seen.pop(request_id, None)  # so that it goes to the end
                until, count = now + within.total_seconds(), 0
            self._seen[request_id] = until, count + 1
            if len(self._seen) > REMEMBERED:
                del self._seen[next(iter(self._seen))]
            return count + 1

    def forget(self, request_id: str) -> None:
        """Forget the requests with an id."""
        with self._lock.current:
            self._seen.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        with self._lock.current:
            self._seen.clear()


repeats = Repeats()


class CheckBackThrottle(SimpleRateThrottle):
    """
    Rejects requests beyond `OUTBOX["CHECK_BACK"]["THROTTLE"]`; the broker treats this as UNKNOWN and asks later.

    Requests are counted in Django's default cache: across all processes where they share one, per process where it is local
    memory. Only signed requests count, so that nobody else can use up the broker's rate. A repeated or replayed request counts
    once in a process, and is answered 10 times there.
    """

    _wait: float | None = None  # of a request that was repeated too often

    def allow_request(self, request: Request, view: APIView) -> bool:
        fresh_for = 2 * TOLERANCE  # from the earliest to the latest time of a valid signature
        request_id = str(request.auth)
        times = repeats.count(request_id, within=fresh_for)
        if times > 1:
            self._wait = fresh_for.total_seconds()
            return times <= REPEATS
        is_allowed = bool(super().allow_request(request, view))
        if not is_allowed:
            repeats.forget(request_id)
        return is_allowed

    def wait(self) -> float | None:
        return self._wait or super().wait()

    def get_rate(self) -> str:
        return conf.settings().check_back.throttle

    def parse_rate(self, rate: str | None) -> tuple[int, int]:
        return read_rate(rate or "")

    def get_cache_key(self, request: Request, view: APIView) -> str:
        return "outbox-check-back-throttle"

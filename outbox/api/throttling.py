"""How many answers the endpoint gives in a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from rest_framework.request import Request
from rest_framework.throttling import SimpleRateThrottle
from rest_framework.views import APIView

from outbox import conf
from outbox.check_backs.rate import read_rate

REPEATS = 10
REMEMBERED = 10_000


class Repeats:
    """
    Counts how often a request came, by its id: of the newest ones that this process has seen, for as long as they are fresh.

    Args:
        clock: returns seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # id -> until when it counts, how often it came; oldest first
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def count(self, request_id: str, *, within: timedelta) -> int:
        """Count a request; return how often it came, 1 for the first time."""
        with self._lock:
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
        """Take the next request of that id for the first one."""
        with self._lock:
            self._seen.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        with self._lock:
            self._seen.clear()

    def _renew_lock(self) -> None:
        """Another thread of the parent may have held it."""
        self._lock = threading.Lock()


repeats = Repeats()


class CheckBackThrottle(SimpleRateThrottle):
    """
    Refuses what goes beyond `OUTBOX["CHECK_BACK"]["THROTTLE"]`; the broker reads that as UNKNOWN and asks later.

    It counts in Django's default cache: over all processes where they share one, in each process where it is local
    memory. It stands behind the signature, so that nobody else can use the broker's share up. A request that comes again,
    its sender having heard nothing or somebody having listened, counts once in a process and is answered 10 times there.
    """

    _wait: float | None = None  # of a request that came too often

    def allow_request(self, request: Request, view: APIView) -> bool:
        fresh_for = 2 * conf.settings().check_back.tolerance  # from the earliest to the latest time that its signature holds
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

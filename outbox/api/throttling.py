"""The throttle of the check-back endpoint. It counts requests in Django's default cache, such as Redis or Memcached."""

from __future__ import annotations

import hashlib
import logging

from django.core.cache import cache
from rest_framework.request import Request
from rest_framework.throttling import SimpleRateThrottle
from rest_framework.views import APIView

from outbox import conf
from outbox.api.authentication import TOLERANCE
from outbox.api.refusals import log_limited
from outbox.check_backs.rate import read_rate

REPEATS = 10  # a request is answered at most this many times
VALID_SECONDS = 2 * TOLERANCE.total_seconds()  # from the earliest to the latest time at which a signature is valid


class CheckBackThrottle(SimpleRateThrottle):
    """
    Rejects requests beyond `OUTBOX["CHECK_BACK"]["THROTTLE"]`; the broker takes this for UNKNOWN and asks again later.

    Requests are counted in Django's default cache: across all processes that share it, or per process if it is in local memory.
    Only signed requests count, so that nobody else can use up the broker's rate. A repeated request counts once, and is answered
    at most 10 times. While the cache cannot be reached, requests are not limited, because the endpoint must not depend on the
    cache.
    """

    _wait: float | None = None  # the seconds to wait after a request that was repeated too often

    def allow_request(self, request: Request, view: APIView) -> bool:
        try:
            return self._count(request, view)
        except Exception as error:  # each cache backend raises errors of its own
            text = "Check-backs are not limited, because the default cache cannot be used: %s: %s"
            log_limited(logging.WARNING, "cache", text, type(error).__name__, error)
            return True

    def _count(self, request: Request, view: APIView) -> bool:
        request_id = str(request.auth)
        received_count = count_request(request_id)
        if received_count > 1:
            self._wait = VALID_SECONDS
            return received_count <= REPEATS
        is_allowed = bool(super().allow_request(request, view))
        if not is_allowed:
            forget_request(request_id)
        return is_allowed

    def wait(self) -> float | None:
        return self._wait or super().wait()

    def get_rate(self) -> str:
        return conf.settings().check_back.throttle

    def parse_rate(self, rate: str | None) -> tuple[int, int]:
        return read_rate(rate or "")

    def get_cache_key(self, request: Request, view: APIView) -> str:
        return "outbox-check-back-throttle"


def count_request(request_id: str) -> int:
    """Count a request; return how often it was received while its signature is valid, including this time."""
    key = _key(request_id)
    cache.add(key, 0, VALID_SECONDS)
    try:
        return cache.incr(key)
    except ValueError:  # the counter has expired or was evicted between the two calls
        return 1


def forget_request(request_id: str) -> None:
    """Remove the counter of a request, because the request was not answered."""
    cache.delete(_key(request_id))


def _key(request_id: str) -> str:
    """Return a key that every cache accepts."""
    return f"outbox-check-back-{hashlib.sha256(request_id.encode()).hexdigest()}"

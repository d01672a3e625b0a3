"""
Health over HTTP, without authentication: the status 200 or 503, and one word for each database.

A process caches the result for one second (`health/`) or five (`health/outbox/`).

`health/` reports whether this process can publish, for load balancers and readiness probes. `health/outbox/` also reports whether
anything needs attention, for monitors. Do not use `health/outbox/` for load balancers, because it would take a working site
offline.
"""

from __future__ import annotations

from rest_framework import status
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from outbox.api.cached import Cached
from outbox.api.refusals import LimitedRefusals
from outbox.monitoring.health import Health, health, readiness

cached_readiness = Cached(readiness, seconds=1)
cached_health = Cached(health, seconds=5)


class ReadinessView(LimitedRefusals):
    """Return 200 while this process can publish to all its databases, otherwise 503."""

    authentication_classes = []
    permission_classes = []
    throttle_classes = []
    renderer_classes = [JSONRenderer]

    def get(self, request: Request) -> Response:
        answers = self.read()
        is_ok = all(answer is Health.OK for answer in answers.values())
        return Response(
            {"status": "ok" if is_ok else "not ok", "databases": answers},
            status=status.HTTP_200_OK if is_ok else status.HTTP_503_SERVICE_UNAVAILABLE,
            headers={"Cache-Control": "no-store"},
        )

    def read(self) -> dict[str, Health]:
        return cached_readiness()


class HealthView(ReadinessView):
    """Return 200 while nothing in the outbox needs attention, otherwise 503."""

    def read(self) -> dict[str, Health]:
        return cached_health()

"""django-reliable-outbox: events as rows, a worker with leases that listens, destinations as classes."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.peers import sink

if sys.version_info < (3, 12):
    raise ImportError("django-reliable-outbox needs Python 3.12")

DISTRIBUTION = "django-reliable-outbox"
APPS = ["reliable_outbox"]
SETTINGS = {"RELIABLE_OUTBOX": {"DESTINATIONS": {"default": {"BACKEND": "benchmarks.peers.reliable_outbox.Null"}}}}
RELAY_COMMAND = ["outbox_worker"]


class Null:
    """A destination."""

    def deliver(self, envelope: Any) -> None:
        sink.take(envelope.payload["id"])


def write(customer: str, total: str) -> int:
    from reliable_outbox import publish

    from benchmarks.models import Order

    order = Order.objects.create(customer=customer, total=total)
    publish("order.created", {"id": order.pk, "customer": customer, "total": total}, key=str(order.pk))
    return order.pk

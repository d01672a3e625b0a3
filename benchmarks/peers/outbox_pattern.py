"""django-outbox-pattern: messages as rows, which a command sends by STOMP. A decorated model, its other way, adds a savepoint."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.peers import sink

DISTRIBUTION = "django-outbox-pattern"
APPS = ["django_outbox_pattern"]
SETTINGS = {"DJANGO_OUTBOX_PATTERN": {"DEFAULT_CONNECTION_CLASS": "benchmarks.peers.outbox_pattern.NullConnection"}}
RELAY_COMMAND = ["publish"]


class NullConnection:
    """A STOMP connection as the package uses one."""

    def __init__(self, **options: Any) -> None:
        pass

    def connect(self, **options: Any) -> None:
        pass

    def is_connected(self) -> bool:
        return True

    def disconnect(self) -> None:
        pass

    def send(self, body: str, **options: Any) -> None:
        sink.take(json.loads(body)["id"])


def write(customer: str, total: str) -> int:
    from django_outbox_pattern.models import Published

    from benchmarks.models import Order

    order = Order.objects.create(customer=customer, total=total)
    Published.objects.create(destination="orders", body={"id": order.pk, "customer": customer, "total": total})
    return order.pk

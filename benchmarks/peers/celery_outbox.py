"""django-celery-outbox: a Celery whose tasks are stored, and sent by its command. Kombu's memory transport takes them."""

from __future__ import annotations

from typing import Any

from celery.signals import before_task_publish
from django_celery_outbox import OutboxCelery

from benchmarks.peers import sink

DISTRIBUTION = "django-celery-outbox"
APPS = ["django_celery_outbox"]
SETTINGS = {"CELERY_OUTBOX_APP": "benchmarks.peers.celery_outbox.app"}
RELAY_COMMAND = ["celery_outbox_relay"]

app = OutboxCelery("peers", broker="memory://")


@app.task
def handle(number: int, customer: str, total: str) -> None:
    """Never run."""


@before_task_publish.connect
def _take(body: Any, **others: Any) -> None:
    sink.take(body[0][0])


def write(customer: str, total: str) -> int:
    from benchmarks.models import Order

    order = Order.objects.create(customer=customer, total=total)
    handle.delay(order.pk, customer, total)
    return order.pk

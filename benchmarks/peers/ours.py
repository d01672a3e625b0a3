"""This package."""

from __future__ import annotations

DISTRIBUTION = "django-transactional-outbox"
APPS = ["outbox"]
SETTINGS = {
    "OUTBOX": {
        "BROKERS": {"default": {"BACKEND": "benchmarks.peers.sink_broker.SinkBroker"}},
        "TOPICS": {"bench-two-phase": {"TYPE": "normal"}, "bench-clocked": {}, "bench-consumed": {}, "bench-rocketmq": {}},
        "CELERY_WAKEUP": False,
    },
    "ROOT_URLCONF": None,
    "SILENCED_SYSTEM_CHECKS": ["outbox.E027"],  # nobody answers the sink's questions, and it asks none
}
RELAY_COMMAND = ["outbox_relay"]


def write(customer: str, total: str) -> int:
    # Settings are read from this file before Django is set up, here and in the files beside it.
    from benchmarks.messages import BenchOrder
    from benchmarks.models import Order
    from outbox import publish

    order = Order.objects.create(customer=customer, total=total)
    publish(BenchOrder(order_id=order.pk, customer=customer, total=total))
    return order.pk

"""django-jaiminho: stores the call of a function, which its command makes. In order, so that the request does not make it."""

from __future__ import annotations

DISTRIBUTION = "django-jaiminho"
APPS = ["jaiminho"]
SETTINGS = {"JAIMINHO_CONFIG": {"PUBLISH_STRATEGY": "keep-order"}}
RELAY_COMMAND = ["events_relay", "--run-in-loop"]


def write(customer: str, total: str) -> int:
    from benchmarks.models import Order
    from benchmarks.peers.jaiminho_events import order_created

    order = Order.objects.create(customer=customer, total=total)
    order_created({"id": order.pk, "customer": customer, "total": total})
    return order.pk

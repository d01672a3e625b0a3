"""procrastinate: jobs as rows; its worker listens and runs them itself, so the job's function is the stand-in for the broker."""

from __future__ import annotations

from benchmarks.peers import sink

DISTRIBUTION = "procrastinate"
APPS = ["procrastinate.contrib.django"]
SETTINGS = {"PROCRASTINATE_IMPORT_PATHS": ["benchmarks.peers.procrastinate_tasks"]}
RELAY_COMMAND = ["procrastinate", "worker"]


def take(number: int, customer: str, total: str) -> None:
    sink.take(number)


def write(customer: str, total: str) -> int:
    from benchmarks.models import Order
    from benchmarks.peers.procrastinate_tasks import handle

    order = Order.objects.create(customer=customer, total=total)
    handle.defer(number=order.pk, customer=customer, total=total)
    return order.pk

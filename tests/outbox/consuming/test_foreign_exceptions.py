"""An exception that is not the database's, raised at any place of a handler's transaction: a task's time limit, a signal's."""

from collections import Counter
from datetime import timedelta

import pytest
from django.db import connections

from outbox import RetryPolicy, consumer, database
from outbox.brokers.memory import MemoryBroker
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from project.shop.models import CartEntry
from tests.foreign_exceptions import Place, planted
from tests.outbox.consuming.deliveries import outgoing
from tests.outbox.consuming.messages import Placed
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

INVOICES = [f"A{number}" for number in range(4)]


def step(worker: Worker) -> int:
    """Do one step, as `run` does, which outlasts trouble."""
    try:
        return worker.step(timedelta(0))
    except Exception:
        worker.close()
        return -1


def count_deferred(connection: database.Connection) -> int:
    """End the delays of all deferred messages; return their number."""
    return connection.execute("UPDATE outbox_deferred SET due_at = clock_timestamp()").rowcount


@pytest.mark.parametrize("place", Place)
def test_at_every_call_loses_nothing_that_is_acknowledged(broker: MemoryBroker, place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outbox.consuming.worker.POLL_SECONDS", 0.0)

    @consumer(Placed, group="cart", retry=RetryPolicy(limit=5, delays=[timedelta(0)], jitter=0))
    def clear_cart(message: Placed, context: object) -> None:
        CartEntry.objects.create(invoice=message.invoice, change=-1)

    worker = Worker(group("cart"), "default")
    with database.connect("default") as own, planted() as bomb:
        for nth in bomb.numbers(at_least=10):
            invoices = [f"{invoice}-{nth}" for invoice in INVOICES]
            broker.send([outgoing(Placed(invoice)) for invoice in invoices])
            bomb.arm(nth, place)
            wait_until(lambda: step(worker) == 0 and not sum(broker.backlog("cart").waiting.values()) and not count_deferred(own))
            bomb.disarm()
            connections["default"].close()
            applied = Counter(CartEntry.objects.filter(invoice__in=invoices).values_list("invoice", flat=True))
            assert applied == dict.fromkeys(invoices, 1), f"call {nth}: {applied}"

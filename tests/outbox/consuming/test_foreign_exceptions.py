"""
An exception that is not the database's, raised at any place of a handler's transaction: a task's time limit, a signal's.

Django's connection may be left inside the transaction then, with autocommit off, where later blocks commit nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any

import psycopg
import pytest
from django.db import connections

from outbox import Retry, consumer
from outbox.brokers.memory import MemoryBroker
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import outgoing
from tests.outbox.consuming.messages import Placed
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

INVOICES = [f"A{number}" for number in range(4)]


class TimeIsOver(Exception):
    """As Celery's SoftTimeLimitExceeded: no error of the database."""


class Bomb:
    """Raises at a certain call to PostgreSQL of this thread's Django connection, before or behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.nth, self.is_behind = 0, 0, False
        wait = psycopg.Connection.wait

        def count_and_wait(connection: Any, *arguments: Any, **named: Any) -> Any:
            if connection is not connections["default"].connection:
                return wait(connection, *arguments, **named)
            self.calls += 1
            if self.calls == self.nth and not self.is_behind:
                raise TimeIsOver
            result = wait(connection, *arguments, **named)
            if self.calls == self.nth:
                raise TimeIsOver
            return result

        monkeypatch.setattr(psycopg.Connection, "wait", count_and_wait)

    def arm(self, nth: int, *, is_behind: bool) -> None:
        """Raise at that call from now on."""
        self.calls, self.nth, self.is_behind = 0, nth, is_behind


@pytest.fixture
def bomb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bomb]:
    found = Bomb(monkeypatch)
    yield found
    found.arm(0, is_behind=False)
    connections["default"].close()


def step(worker: Worker) -> int:
    """Do one step, as `run` does, which outlasts trouble."""
    try:
        return worker.step(timedelta(0))
    except Exception:
        worker.close()
        return -1


@pytest.mark.parametrize("is_behind", [False, True], ids=["before", "behind"])
def test_at_every_call_loses_nothing_that_is_acknowledged(
    broker: MemoryBroker, bomb: Bomb, is_behind: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("outbox.consuming.handle.OUTLAST_OUTAGES", Retry(limit=50, delays=[timedelta(0)], jitter=0))

    @consumer(Placed, group="cart", retry=Retry(limit=5, delays=[timedelta(0)], jitter=0))
    def clear_cart(message: Placed, context: object) -> None:
        CartEntry.objects.create(invoice=message.invoice, change=-1)

    worker = Worker(group("cart"), "default")
    places = 0
    for nth in count(1):
        invoices = [f"{invoice}-{nth}" for invoice in INVOICES]
        broker.send([outgoing(Placed(invoice)) for invoice in invoices])
        bomb.arm(nth, is_behind=is_behind)
        wait_until(lambda: step(worker) == 0 and not sum(broker.backlog("cart").values()))
        is_over = bomb.calls < nth
        bomb.arm(0, is_behind=False)
        connections["default"].close()
        applied = Counter(CartEntry.objects.filter(invoice__in=invoices).values_list("invoice", flat=True))
        assert applied == dict.fromkeys(invoices, 1), f"call {nth}: {applied}"
        if is_over:
            break
        places += 1
    assert places > 10

"""The claim, between two real connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from django.db import connections

from outbox import consumer, database
from outbox.consuming.handle import Outcome, handle
from outbox.consuming.register import group
from outbox.models import Duplicate
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import delivery
from tests.outbox.consuming.messages import Placed
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

WAITING_INSERTS = """
SELECT 1 FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%INSERT INTO outbox_inbox%'
"""


class Gate:
    """A handler that writes, then waits inside its transaction until it is let on; told to fail, it then raises."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_on = threading.Event()
        self.fails = False

    def handle(self, message, context) -> None:
        CartEntry.objects.create(invoice=message.invoice, change=-1)
        if not self.entered.is_set():
            self.entered.set()
            assert self.let_on.wait(10)
            if self.fails:
                raise ValueError("after all not")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def deliver(gate) -> Iterator[object]:
    """Deliver one and the same message once more, in a thread with a connection of its own."""
    consumer(Placed, group="cart")(gate.handle)
    same = delivery(Placed("A1"))
    pool = ThreadPoolExecutor(2)

    def work() -> Outcome:
        try:
            return handle(group("cart"), same).outcome
        finally:
            connections.close_all()

    yield lambda: pool.submit(work)
    gate.let_on.set()
    pool.shutdown()


def deliver_twice(deliver, gate) -> tuple[Future, Future]:
    """The second comes while the first is in its handler, and waits at the inbox row."""
    first = deliver()
    assert gate.entered.wait(10)
    second = deliver()
    with database.connect("default") as observer:
        wait_until(lambda: observer.execute(WAITING_INSERTS).fetchone())
    return first, second


class TestClaim:
    def test_lets_the_second_wait_and_then_drops_it(self, deliver, gate):
        first, second = deliver_twice(deliver, gate)

        gate.let_on.set()

        assert (first.result(10), second.result(10)) == (Outcome.HANDLED, Outcome.DUPLICATE)
        assert CartEntry.objects.count() == Duplicate.objects.count() == 1

    def test_lets_the_second_handle_it_when_the_first_fails(self, deliver, gate):
        gate.fails = True
        first, second = deliver_twice(deliver, gate)

        gate.let_on.set()

        assert (first.result(10), second.result(10)) == (Outcome.RETRY, Outcome.HANDLED)
        assert CartEntry.objects.count() == 1

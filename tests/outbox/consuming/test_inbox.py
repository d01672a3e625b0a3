"""The claim, between two real connections."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection, connections

from outbox import consumer
from outbox.consuming.handle import handle
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import group
from outbox.models import Duplicate, FailedDelivery
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import delivery, end_delays, run_due
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db(transaction=True)


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


class TestClaim:
    def test_waits_for_nobody_who_handles_the_message(self, deliver, gate):
        first = deliver()
        assert gate.entered.wait(10)

        assert deliver().result(10) is Outcome.DEFERRED
        assert run_due() == [Outcome.DEFERRED]
        assert not first.done()

        gate.let_on.set()
        assert first.result(10) is Outcome.HANDLED
        end_delays()
        assert run_due() == [Outcome.DUPLICATE]
        assert deliver().result(10) is Outcome.DUPLICATE
        assert CartEntry.objects.count() == 1
        assert Duplicate.objects.count() == 2

    def test_is_free_again_when_the_first_fails(self, deliver, gate):
        gate.fails = True
        first = deliver()
        assert gate.entered.wait(10)
        gate.let_on.set()

        assert first.result(10) is Outcome.DEFERRED
        end_delays()
        assert run_due() == [Outcome.HANDLED]
        assert CartEntry.objects.count() == 1

    def test_writes_no_failure_of_a_message_that_another_process_handles(self, deliver, gate):
        deliver()
        assert gate.entered.wait(10)

        deliver().result(10)

        assert not FailedDelivery.objects.exists()


class TestIdleTransaction:
    IDLE = "SELECT current_setting('idle_in_transaction_session_timeout')"

    def read_in_handler(self) -> str:
        found = []

        @consumer(Placed, group="timed")
        def look(message, context):
            with connection.cursor() as cursor:
                cursor.execute(self.IDLE)
                found.append(cursor.fetchone()[0])

        handle(group("timed"), delivery(Placed("A1")))
        return found[0]

    def test_lasts_no_longer_than_invisible(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"INVISIBLE": timedelta(seconds=7)}}

        assert self.read_in_handler() == "5250ms"
        with connection.cursor() as cursor:
            assert cursor.execute(self.IDLE).fetchone() == ("0",)

    def test_lasts_as_long_as_the_database_is_told(self):
        with connection.cursor() as cursor:
            cursor.execute("SET idle_in_transaction_session_timeout = '3min'")
        try:
            assert self.read_in_handler() == "3min"
        finally:
            connection.close()

    def test_is_not_ended_while_its_handler_is_at_work(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"INVISIBLE": timedelta(seconds=0.4)}}

        @consumer(Placed, group="slow")
        def call_a_service(message, context):
            CartEntry.objects.create(invoice=message.invoice, change=1)
            threading.Event().wait(1.2)

        assert handle(group("slow"), delivery(Placed("A1"))).outcome is Outcome.HANDLED
        assert CartEntry.objects.count() == 1


@pytest.mark.usefixtures("fifo")
class TestOrder:
    """Messages of one key on an ordered topic, both delivered at once: an operator's replay beside a later message, say."""

    def deliver(self, key: str):
        result = handle(group("cart"), delivery(Placed("A2"), key=key))
        connections.close_all()
        return result

    def test_lets_one_message_of_a_key_into_a_handler_at_a_time(self, gate):
        consumer(Placed, group="cart")(gate.handle)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self.deliver, "A")
            assert gate.entered.wait(10)

            beside = handle(group("cart"), delivery(Placed("A1"), key="A"))
            assert run_due() == [Outcome.DEFERRED]
            end_delays()
            other_key = handle(group("cart"), delivery(Placed("A1"), key="B"))
            gate.let_on.set()

            assert beside.outcome is Outcome.DEFERRED
            assert other_key.outcome is Outcome.HANDLED
            assert first.result(10).outcome is Outcome.HANDLED
        assert run_due() == [Outcome.HANDLED]
        assert handle(group("cart"), delivery(Placed("A1"), key="A")).outcome is Outcome.HANDLED

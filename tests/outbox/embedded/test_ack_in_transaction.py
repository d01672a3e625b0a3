"""A message that comes alone is acknowledged by its handler's transaction, if the broker's tables are in that database."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections
from django.db.models.functions import Now

from outbox import conf, consumer, database, failpoints
from outbox.consuming.delivery_info import dedupe_key_of
from outbox.consuming.handle import handle
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import group
from outbox.consuming.worker import Counts, Worker
from outbox.database.locks import Lock
from outbox.embedded import EmbeddedBroker, settlement
from outbox.embedded.models import EmbeddedDelivery
from outbox.failpoints import VARIABLE, FailpointReached
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import delivery, end_delays, outgoing
from tests.outbox.consuming.messages import Placed
from tests.outbox.embedded.conftest import Statements
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("no_consumers")]

BACKEND = "outbox.embedded.EmbeddedBroker"
NO_WAIT = timedelta(0)


@pytest.fixture(autouse=True)
def _one_phase(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"orders": {"TYPE": "normal"}}}


@pytest.fixture
def embedded() -> Iterator[EmbeddedBroker]:
    with closing(conf.make_broker("default")) as broker:
        assert isinstance(broker, EmbeddedBroker)
        yield broker


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker of the group "cart", made at its first call: after the test's consumers."""
    with closing(Worker(group("cart"), "default")) as worker:
        yield worker


class Handler:
    """Writes an entry, then does what the test says."""

    def __init__(self) -> None:
        consumer(Placed, group="cart")(self.handle)
        self.then: Any = None

    def handle(self, message: Placed, context: object) -> None:
        CartEntry.objects.create(invoice=message.invoice, change=-1)
        if self.then is not None:
            self.then()


@pytest.fixture(autouse=True)
def handler(no_consumers: None) -> Handler:
    return Handler()


class TestLoneMessage:
    def test_needs_no_transaction_of_its_own(self, worker: Worker, embedded: EmbeddedBroker, statements: Statements):
        embedded.send([outgoing(Placed("A1"))])

        with statements.counted() as sent:
            worker.step(NO_WAIT)

        assert settlement.ACK not in sent
        assert worker.counts == Counts(handled=1)
        assert not EmbeddedDelivery.objects.exists()

    def test_does_not_come_again_when_the_process_dies_after_the_commit(
        self, worker: Worker, embedded: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv(VARIABLE, "consumer.after_commit=raise")
        monkeypatch.setattr(failpoints, "_passes", Counter())
        embedded.send([outgoing(Placed("A1"))])

        with pytest.raises(FailpointReached):
            worker.step(NO_WAIT)

        assert CartEntry.objects.count() == 1
        assert not EmbeddedDelivery.objects.exists()

    def test_comes_again_when_the_handler_fails(self, worker: Worker, embedded: EmbeddedBroker, handler: Handler):
        def fail() -> None:
            handler.then = None
            raise ValueError("not this time")

        handler.then = fail
        embedded.send([outgoing(Placed("A1"))])

        worker.step(NO_WAIT)
        assert not CartEntry.objects.exists()
        EmbeddedDelivery.objects.update(due_at="2000-01-01T00:00Z")
        end_delays()
        worker.step(NO_WAIT)

        assert worker.counts == Counts(handled=1, retried=1)
        assert CartEntry.objects.count() == 1
        assert not EmbeddedDelivery.objects.exists()

    def test_is_acknowledged_though_the_handler_leaves_another_search_path(
        self, worker: Worker, embedded: EmbeddedBroker, handler: Handler
    ):
        handler.then = lambda: connection.cursor().execute("SET LOCAL search_path TO elsewhere")
        embedded.send([outgoing(Placed("A1"))])

        worker.step(NO_WAIT)

        assert worker.counts == Counts(handled=1)
        assert not EmbeddedDelivery.objects.exists()

    def test_is_acknowledged_as_a_duplicate(self, worker: Worker, embedded: EmbeddedBroker):
        sent = outgoing(Placed("A1"))
        embedded.send([sent])
        worker.step(NO_WAIT)
        embedded.deliver_again("cart", [sent.message_id])

        worker.step(NO_WAIT)

        assert worker.counts == Counts(handled=1, duplicates=1)
        assert not EmbeddedDelivery.objects.exists()

    def test_stays_with_the_broker_while_another_process_handles_it(self, worker: Worker, embedded: EmbeddedBroker):
        sent = outgoing(Placed("A1"))
        embedded.send([sent])
        key = f"cart {dedupe_key_of(sent.message_id, '')}"

        with database.connect("default") as other, other.transaction():
            other.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", [int(Lock.INBOX), key])
            worker.step(NO_WAIT)

        assert worker.counts == Counts(handed_back=1)
        assert EmbeddedDelivery.objects.get().is_held

    def test_is_the_handlers_beyond_the_time_for_which_it_was_received(
        self, worker: Worker, embedded: EmbeddedBroker, handler: Handler, gate: threading.Event, settings: Any
    ):
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"INVISIBLE": timedelta(seconds=1)}}
        handler.then = lambda: gate.wait(20)
        embedded.send([outgoing(Placed("A1"))])

        with ThreadPoolExecutor(1) as pool, closing(Worker(group("cart"), "default")) as first:
            running = pool.submit(in_thread, lambda: first.step(NO_WAIT))
            wait_until(EmbeddedDelivery.objects.filter(due_at__lt=Now()).exists)
            assert worker.step(NO_WAIT) == 0
            gate.set()
            running.result(20)

        assert first.counts == Counts(handled=1)
        assert worker.step(NO_WAIT) == 0
        assert not EmbeddedDelivery.objects.exists()

    def test_that_others_have_by_now_is_not_acknowledged_for_them(self, embedded: EmbeddedBroker):
        embedded.send([outgoing(Placed("A1"))])
        [ours] = embedded.receive("cart", ["orders"], limit=1, invisible_for=NO_WAIT, wait=NO_WAIT)
        [theirs] = embedded.receive("cart", ["orders"], limit=1, invisible_for=timedelta(minutes=1), wait=NO_WAIT)

        result = handle(group("cart"), ours, stored=embedded)

        assert (result.outcome, result.is_acknowledged) == (Outcome.HANDLED, False)
        assert embedded.ack([theirs]) == [True]

    def test_of_an_ordered_topic_makes_way_for_the_next_of_its_key(
        self, embedded: EmbeddedBroker, handler: Handler, settings: Any
    ):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"orders": {"TYPE": "fifo"}}}
        with closing(conf.make_broker("default")) as ordered, closing(Worker(group("cart"), "default")) as worker:
            ordered.send([outgoing(Placed(invoice), key="same") for invoice in ("A1", "A2")])

            assert worker.step(NO_WAIT) == 1
            assert worker.step(NO_WAIT) == 1

        assert list(CartEntry.objects.order_by("id").values_list("invoice", flat=True)) == ["A1", "A2"]


class TestOthers:
    def test_several_are_acknowledged_together(self, worker: Worker, embedded: EmbeddedBroker, statements: Statements):
        embedded.send([outgoing(Placed(invoice)) for invoice in ("A1", "A2", "A3")])

        with statements.counted() as sent:
            worker.run(until_idle=True)

        assert sent.count(settlement.ACK) == 1
        assert worker.counts == Counts(handled=3)

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_one_of_a_broker_in_another_database_is_acknowledged_there(self, settings: Any, statements: Statements):
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {"default": {"BACKEND": BACKEND, "OPTIONS": {"DATABASE": "other"}}}}
        with closing(conf.make_broker("default")) as elsewhere, closing(Worker(group("cart"), "default")) as worker:
            elsewhere.send([outgoing(Placed("A1"))])

            with statements.counted() as sent:
                worker.step(NO_WAIT)

        assert sent.count(settlement.ACK) == 1
        assert worker.counts == Counts(handled=1)

    @pytest.mark.django_db(transaction=False)
    def test_one_in_the_transaction_of_a_test_is_left_to_the_caller(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(EmbeddedBroker, "ack_in_transaction", None)
        with closing(conf.make_broker("default")) as broker:
            assert isinstance(broker, EmbeddedBroker)

            result = handle(group("cart"), delivery(Placed("A1")), stored=broker)

        assert (result.outcome, result.is_acknowledged) == (Outcome.HANDLED, False)


def in_thread(call: Any) -> Any:
    """Return the result of a call in another thread, whose connections are closed."""
    try:
        return call()
    finally:
        connections.close_all()

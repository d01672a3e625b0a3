"""The database goes away in the middle: nothing is lost, nothing is applied twice, the worker goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import DatabaseError, OperationalError, connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import Retry, consumer, database
from outbox.consuming import outcome
from outbox.consuming import worker as worker_module
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.errors import BrokerUnavailable
from outbox.models import FailedDelivery, FailureCount
from outbox.outages import Backoff
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import outgoing
from tests.outbox.consuming.messages import Placed
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

NO_WAIT = timedelta(0)
END_THIS_CONNECTION = "SELECT pg_terminate_backend(pg_backend_pid())"


@pytest.fixture
def worker(worker) -> Worker:
    """A worker of the group "cart", whose handler loses its database at its first call."""
    calls = []

    @consumer(Placed, group="cart", retry=Retry(limit=0, delays=[timedelta(seconds=1)], jitter=0))
    def clear_cart(message, context):
        CartEntry.objects.create(invoice=message.invoice, change=-1)
        calls.append(message.invoice)
        if len(calls) == 1:
            lose_the_database(message)

    def lose_the_database(message):
        try:
            with connection.cursor() as cursor:
                cursor.execute(END_THIS_CONNECTION)
        except DatabaseError:
            if not message.invoice.startswith("swallow"):
                raise

    return worker()


class TestASessionThatAHandlerLeftReadOnly:
    def test_is_left_for_another_one(self, broker, clock):
        handled: list[str] = []

        @consumer(Placed, group="cart")
        def spoil(message, context):
            handled.append(message.invoice)
            with connection.cursor() as cursor:
                cursor.execute("SET SESSION default_transaction_read_only = on")

        broker.send([outgoing(Placed("A1"))])
        one = Worker(group("cart"), "default")
        thread = threading.Thread(target=self._run, args=[one])
        thread.start()
        try:
            wait_until(lambda: handled == ["A1"])
            broker.send([outgoing(Placed("A2"))])
            wait_until(lambda: clock.forward(timedelta(seconds=30)) or handled == ["A1", "A2"])
        finally:
            one.stop()
            thread.join(20)

    def _run(self, one: Worker) -> None:
        one.run()
        one.close()
        connections.close_all()


class TestWorker:
    @pytest.mark.parametrize("invoice", ["A1", "swallowed"])
    def test_retries_a_message_that_lost_its_database_whatever_the_policy(self, worker, broker, clock, invoice):
        broker.send([outgoing(Placed(invoice))])

        worker.step(NO_WAIT)
        assert not CartEntry.objects.exists()
        clock.forward(timedelta(seconds=2))
        worker.step(NO_WAIT)

        assert CartEntry.objects.count() == 1
        assert (worker.counts.retried, worker.counts.dead_letters, worker.counts.handled) == (1, 0, 1)
        assert FailedDelivery.objects.get().outcome == "retry"

    def test_hands_the_others_of_its_batch_back(self, worker, broker, clock):
        broker.send([outgoing(Placed(invoice)) for invoice in ("A1", "A2", "A3")])

        worker.step(NO_WAIT)
        assert not CartEntry.objects.exists()
        worker.step(NO_WAIT)

        assert set(CartEntry.objects.values_list("invoice", flat=True)) == {"A2", "A3"}

    def test_hands_back_what_it_received_when_the_database_is_away_then(self, broker, monkeypatch, clock):
        consumer(Placed, group="late")(lambda message, context: CartEntry.objects.create(invoice="A1", change=1))
        broker.send([outgoing(Placed("A1")), outgoing(Placed("A2"))])
        broker.receive("late", ["orders"], limit=9, invisible_for=timedelta(seconds=1), wait=NO_WAIT)
        clock.forward(timedelta(seconds=2))
        worker = Worker(group("late"), "default")
        with monkeypatch.context() as patch:
            patch.setattr(outcome, "UNENDED", f"{END_THIS_CONNECTION} WHERE %s::text IS NOT NULL AND %s::uuid[] IS NOT NULL")
            with pytest.raises(OperationalError):
                worker.step(NO_WAIT)
        worker.close()

        assert worker.step(NO_WAIT) == 2
        assert worker.counts.handled == 2

    def test_ends_its_runs_when_the_database_is_back_though_the_broker_was_away_with_it(self, broker, monkeypatch, clock):
        @consumer(Placed, group="both")
        def lose_the_database(message, context):
            with connection.cursor() as cursor:
                cursor.execute(END_THIS_CONNECTION)

        def away(*_, **__):
            raise BrokerUnavailable("gone")

        def still_away(*_, **__):
            raise OperationalError("gone")

        broker.send([outgoing(Placed("A1"))])
        broker.receive("both", ["orders"], limit=1, invisible_for=timedelta(seconds=1), wait=NO_WAIT)
        clock.forward(timedelta(seconds=2))
        worker = Worker(group("both"), "default")
        with monkeypatch.context() as patch:
            patch.setattr(type(broker), "retry", away)
            patch.setattr(outcome, "end_run", still_away)
            with pytest.raises(BrokerUnavailable):
                worker.step(NO_WAIT)
        worker.close()
        assert FailureCount.objects.get().begun_at is not None

        worker.step(NO_WAIT)

        assert FailureCount.objects.get().begun_at is None

    def test_notices_a_connection_that_was_lost_while_it_waited(self, broker, monkeypatch):
        consumer(Placed, group="idle")(lambda message, context: CartEntry.objects.create(invoice="A1", change=1))
        worker = Worker(group("idle"), "default")
        worker.step(NO_WAIT)
        with database.connect("default") as other:
            other.execute("SELECT pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
        broker.send([outgoing(Placed("A1"))])
        monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0)

        worker.step(NO_WAIT)

        assert (worker.counts.handled, worker.counts.retried) == (1, 0)

    def test_takes_no_message_while_the_database_is_away(self, broker, monkeypatch):
        consumer(Placed, group="patient")(lambda message, context: None)
        worker = Worker(group("patient"), "default")
        troubles = [OperationalError("away"), OperationalError("still away")]
        ensure = BaseDatabaseWrapper.ensure_connection

        def fail_twice(self):
            if troubles:
                raise troubles.pop()
            ensure(self)

        monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", fail_twice)
        monkeypatch.setattr(worker_module, "BACKOFF", Backoff(*[timedelta(seconds=0.01)] * 2, lambda: 1.0))
        seen = []
        consumer(Placed, group="patient")(lambda message, context: seen.append(context.delivery_count))
        broker.send([outgoing(Placed("A1"))])

        counts = worker.run(until_idle=True)

        assert troubles == []
        assert (counts.handled, counts.retried) == (1, 0)

    @pytest.mark.parametrize(
        ("error", "waits"), [(OperationalError("away"), [0.2, 0.4, 0.8, 1.6, 2.0]), (RuntimeError("odd"), [2.0] * 5)]
    )
    def test_waits_longer_each_time_for_a_server_and_longest_after_any_other_error(self, worker, monkeypatch, error, waits):
        found = []
        steps = iter([error] * 5)

        def step(wait):
            if (error := next(steps, None)) is not None:
                raise error
            worker.stop()
            return 0

        monkeypatch.setattr(worker_module, "BACKOFF", replace(worker_module.BACKOFF, random=lambda: 1.0))
        monkeypatch.setattr(worker, "step", step)
        monkeypatch.setattr(worker, "_say", lambda error, pause: found.append(pause))
        monkeypatch.setattr(worker._stop, "wait", lambda seconds: None)

        worker.run()

        assert found == waits

    @pytest.mark.parametrize("how", [{"until_idle": True}, {"once": True}])
    def test_gives_up_when_trouble_lasts_longer_than_its_patience(self, worker, monkeypatch, how):
        monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", away)
        monkeypatch.setattr(worker_module, "BACKOFF", Backoff(*[timedelta(seconds=0.05)] * 2, lambda: 1.0))
        began = time.monotonic()

        with pytest.raises(OperationalError, match="away"):
            worker.run(**how, patience=0.3)

        assert 0.3 <= time.monotonic() - began < 5

    def test_outlasts_any_trouble_where_no_end_was_asked_for(self, worker, monkeypatch):
        monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", away)
        monkeypatch.setattr(worker_module, "BACKOFF", Backoff(*[timedelta(seconds=0.01)] * 2, lambda: 1.0))

        assert worker.run(seconds=0.3).handled == 0


def away(connection):
    raise OperationalError("away")

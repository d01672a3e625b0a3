"""The database goes away in the middle: nothing is lost, nothing is applied twice, the worker goes on."""

import threading
import time
from datetime import timedelta

import psycopg
import pytest
from django.db import DatabaseError, OperationalError, connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from msgspec.structs import replace

from outbox import RetryPolicy, consumer, database
from outbox.consuming import deferred
from outbox.consuming import worker as worker_module
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.models import Deferred, FailedDelivery
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

    @consumer(Placed, group="cart", retry=RetryPolicy(limit=0, delays=[timedelta(seconds=1)], jitter=0))
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
    def test_releases_a_message_that_lost_its_database_whatever_the_policy(self, worker, broker, clock, invoice):
        broker.send([outgoing(Placed(invoice))])

        worker.step(NO_WAIT)
        assert not CartEntry.objects.exists()
        for _ in range(2):  # it is deferred, since it was delivered before, and run
            worker.step(NO_WAIT)

        assert CartEntry.objects.count() == 1
        worker.step(NO_WAIT)
        assert (worker.counts.released, worker.counts.dead_letters, worker.counts.handled) == (1, 0, 1)
        assert not FailedDelivery.objects.exists()

    def test_releases_the_others_of_its_batch(self, worker, broker, clock):
        broker.send([outgoing(Placed(invoice)) for invoice in ("A1", "A2", "A3")])

        worker.step(NO_WAIT)
        assert not CartEntry.objects.exists()
        for _ in range(2):
            worker.step(NO_WAIT)

        assert set(CartEntry.objects.values_list("invoice", flat=True)) == {"A1", "A2", "A3"}

    def test_releases_what_it_cannot_defer(self, broker, monkeypatch):
        consumer(Placed, group="late")(lambda message, context: CartEntry.objects.create(invoice="A1", change=1))
        broker.send([outgoing(Placed("A1")), outgoing(Placed("A2"))])
        broker.release(broker.receive("late", ["orders"], limit=9, invisible_for=timedelta(seconds=1), wait=NO_WAIT))
        worker = Worker(group("late"), "default")
        with monkeypatch.context() as patch:
            patch.setattr(deferred, "DEFER", "SELECT pg_terminate_backend(pg_backend_pid()) WHERE %(group)s = 'late'")
            worker.step(NO_WAIT)

        assert worker.counts.released == 2
        for _ in range(2):
            worker.step(NO_WAIT)
        assert worker.counts.handled == 2

    def test_ends_its_runs_when_the_database_is_back(self, broker):
        @consumer(Placed, group="both")
        def lose_the_database(message, context):
            if not context.failures and ends:
                ends.pop()
                with connection.cursor() as cursor:
                    cursor.execute(END_THIS_CONNECTION)

        ends = [1]
        broker.send([outgoing(Placed("A1"))])
        broker.release(broker.receive("both", ["orders"], limit=1, invisible_for=timedelta(seconds=1), wait=NO_WAIT))
        worker = Worker(group("both"), "default")
        worker.step(NO_WAIT)
        worker.step(NO_WAIT)
        assert Deferred.objects.get().crashes == 2

        worker._recover()

        assert Deferred.objects.get().crashes == 0

    def test_receives_nothing_until_the_database_takes_a_message_again(self, worker, broker, monkeypatch):
        broker.send([outgoing(Placed("A1"))])
        worker.step(NO_WAIT)
        with monkeypatch.context() as patch:
            patch.setattr(
                deferred, "PROBE", "SELECT 1 / 0 WHERE %(group)s = 'cart' AND %(id)s IS NOT NULL AND %(body)s IS NOT NULL"
            )
            with pytest.raises(psycopg.Error):
                worker.step(NO_WAIT)

        for _ in range(2):
            worker.step(NO_WAIT)

        assert CartEntry.objects.count() == 1

    def test_notices_a_connection_that_was_lost_while_it_waited(self, broker, monkeypatch):
        consumer(Placed, group="idle")(lambda message, context: CartEntry.objects.create(invoice="A1", change=1))
        worker = Worker(group("idle"), "default")
        worker.step(NO_WAIT)
        with database.connect("default") as other:
            other.execute("SELECT pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
        broker.send([outgoing(Placed("A1"))])
        monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0)

        worker.step(NO_WAIT)

        assert (worker.counts.handled, worker.counts.deferred) == (1, 0)

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
        assert (counts.handled, counts.deferred) == (1, 0)

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
        monkeypatch.setattr(worker, "_log_error", lambda error, pause: found.append(pause))
        monkeypatch.setattr(worker, "_pause", lambda seconds, *, may_run_due: None)

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

"""How much of a topic a group's database takes in, and what a worker goes on with meanwhile."""

import threading
from contextlib import closing
from datetime import timedelta

import pytest
from django.db import connections

from outbox import RetryPolicy, consumer, database
from outbox.brokers.memory import MemoryBroker
from outbox.consuming import limits, subscriptions
from outbox.consuming import worker as worker_module
from outbox.consuming.limits import TopicLimits
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.errors import BrokerUnavailable
from outbox.models import Deferred
from outbox.monitoring.attention import read_attention
from outbox.outages import Backoff
from outbox.testing.factories import DeferredFactory
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import outgoing
from tests.outbox.consuming.messages import Placed
from tests.waiting import wait_until

NO_WAIT = timedelta(0)


@pytest.fixture(autouse=True)
def _count_anew(monkeypatch) -> None:
    monkeypatch.setattr(limits, "_counted_at", {})
    monkeypatch.setattr(limits, "_full", {})


def defer(count: int, topic: str = "orders", **fields) -> None:
    fields = {"due_at": "2020-01-01T00:00:00Z", "type": "elsewhere"} | fields
    DeferredFactory.create_batch(count, consumer_group="cart", topic=topic, **fields)


@pytest.mark.django_db
class TestWaitingMessages:
    @pytest.fixture
    def limits_of(self, settings, monkeypatch):
        """Return the limits of the group, counted at each look."""
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"MAX_DEFERRED": 10}}
        monkeypatch.setattr(limits, "COUNT_SECONDS", -1.0)
        consumer(Placed, group="cart")(lambda message, context: None)
        return TopicLimits(group("cart"), ["orders", "elsewhere"])

    def test_close_their_topic_until_half_of_them_are_gone(self, limits_of):
        defer(10)
        assert limits_of.open_topics() == ["elsewhere"]

        Deferred.objects.filter(id__in=Deferred.objects.values("id")[:5]).delete()
        assert limits_of.open_topics() == ["elsewhere"]
        Deferred.objects.first().delete()

        assert limits_of.open_topics() == ["orders", "elsewhere"]

    @pytest.mark.parametrize(
        "fields", [{"due_at": "9999-01-01T00:00:00Z"}, {"dead_at": "2020-01-01T00:00:00Z"}], ids=["held", "dead"]
    )
    def test_are_neither_held_nor_dead(self, limits_of, fields):
        defer(20, **fields)

        assert limits_of.open_topics() == ["orders", "elsewhere"]

    def test_are_those_asleep_too(self, limits_of):
        defer(10, due_at=None)

        assert limits_of.open_topics() == ["elsewhere"]


@pytest.mark.django_db
class TestFailures:
    def test_close_their_topic_for_a_while(self, monkeypatch):
        consumer(Placed, group="cart")(lambda message, context: None)
        now = [1000.0]
        monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
        of_worker = TopicLimits(group("cart"), ["orders", "elsewhere"])
        for _ in range(200):
            assert "orders" in of_worker.open_topics()
            of_worker.count_failure("orders")

        assert of_worker.open_topics() == ["elsewhere"]
        now[0] += 0.1

        assert of_worker.open_topics() == ["orders", "elsewhere"]

    def test_that_close_their_topic_are_no_wrong_setting_of_the_broker(self, broker, worker, monkeypatch):
        monkeypatch.setattr(limits, "FAILURES_AT_ONCE", 1.0)
        monkeypatch.setattr(limits, "FAILURES_PER_SECOND", 0.0)

        @consumer(Placed, group="cart")
        def fail(message, context):
            raise ValueError("no")

        broker.send([outgoing(Placed("bad"))])
        fails = worker()
        fails.run(until_idle=True)
        subscriptions.beat(group("cart"), "default")

        assert Deferred.objects.get().failures == 1
        assert fails._limits.open_topics() == []
        assert "outbox.misconfigured" not in {one.id for one in read_attention(database.raw("default"), "default")}

    def test_leave_a_healthy_type_its_share(self, broker, monkeypatch):
        """A flood of failing messages beside good ones: the database takes in hundreds, and the good ones go on."""
        applied: list[str] = []

        @consumer(Placed, group="cart", retry=RetryPolicy(delays=[timedelta(hours=1)]))
        def work(message, context):
            if message.invoice.startswith("bad"):
                raise ValueError("no")
            applied.append(message.invoice)

        now = [1000.0]
        monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
        for number in range(400):
            broker.send([outgoing(Placed(f"bad {number}")), outgoing(Placed(f"good {number}"))])
        with closing(Worker(group("cart"), "default")) as worker:
            for _ in range(60):
                worker.step(NO_WAIT)
                now[0] += 0.05

        assert 200 <= Deferred.objects.count() <= 200 + 60 * 0.05 * 20 + 32
        assert len(applied) >= 200


@pytest.mark.django_db(transaction=True)
class TestBrokerThatIsAway:
    def test_keeps_no_deferred_message_waiting(self, broker, monkeypatch):
        calls: list[int] = []

        @consumer(Placed, group="cart", retry=RetryPolicy(delays=[timedelta(0)], jitter=0))
        def work(message, context):
            calls.append(context.failures)
            if len(calls) < 3:
                raise ValueError("no")
            CartEntry.objects.create(invoice=message.invoice, change=1)

        broker.send([outgoing(Placed("A1"))])
        at_work = Worker(group("cart"), "default")
        at_work.step(NO_WAIT)
        monkeypatch.setattr(worker_module, "BACKOFF", Backoff(*[timedelta(seconds=60)] * 2, lambda: 1.0))

        def away(*arguments, **named):
            raise BrokerUnavailable("gone")

        monkeypatch.setattr(MemoryBroker, "receive", away)
        thread = threading.Thread(target=lambda: (at_work.run(), at_work.close(), connections.close_all()))
        thread.start()
        try:
            wait_until(CartEntry.objects.exists)
        finally:
            at_work.stop()
            thread.join(20)

        assert calls == [0, 1, 2]
        assert not Deferred.objects.exists()


@pytest.mark.django_db
def test_of_what_the_server_gave_up_are_by_topic(monkeypatch):
    monkeypatch.setattr(limits, "MAX_DEAD_LETTERS", 3)
    consumer(Placed, group="cart")(lambda message, context: None)
    defer(3, dead_at="2020-01-01T00:00:00Z")
    Deferred.objects.update(reason="server")

    assert limits.topics_with_room(group("cart"), ["orders", "elsewhere"]) == ["elsewhere"]

import threading
from collections import Counter
from contextlib import closing
from datetime import timedelta

import pytest

from outbox import RetryPolicy, conf, consumer, failpoints
from outbox.brokers.memory import MemoryBroker
from outbox.consuming import deferred, holdings, subscriptions
from outbox.consuming import worker as worker_module
from outbox.consuming.lease_thread import affordable
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.errors import BrokerUnavailable
from outbox.failpoints import VARIABLE, FailpointReached
from outbox.models import Deferred, Inbox, Process
from outbox.outages import Backoff
from outbox.testing.factories import InboxFactory
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import applied, end_delays, errors, outgoing
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db

NO_WAIT = timedelta(0)
SECOND = timedelta(seconds=1)


@pytest.fixture
def worker(worker) -> Worker:
    """A worker of the group "cart", which clears carts; an invoice "bad…" fails."""

    @consumer(Placed, group="cart", retry=RetryPolicy(limit=2, delays=[SECOND], jitter=0))
    def clear_cart(message, context):
        CartEntry.objects.create(invoice=message.invoice, change=-1)
        if message.invoice.startswith("bad"):
            raise ValueError(message.invoice)

    return worker()


class TestBegin:
    def test_tells_the_broker_of_which_topics_the_inbox_has_messages(self, worker, broker, monkeypatch):
        told = []
        monkeypatch.setattr(
            MemoryBroker, "set_owner", lambda client, group, *owner, known_topics: told.append((group, known_topics))
        )
        InboxFactory(consumer_group="cart", topic="orders", number=1, lane=1)
        InboxFactory(consumer_group="billing", topic="parcels", number=1, lane=1)

        worker.step(NO_WAIT)

        assert told == [("cart", ["orders"])]


class TestHeartbeat:
    @pytest.fixture(autouse=True)
    def _no_other_workers(self, monkeypatch):
        monkeypatch.setattr(holdings, "_workers", {})

    def test_has_what_the_worker_cannot_receive(self, worker, broker, monkeypatch):
        monkeypatch.setattr(MemoryBroker, "refusals", {"parcels": "no such queue"})
        worker.step(NO_WAIT)

        subscriptions.beat(worker.group, worker.alias)

        assert Process.objects.get(kind="consumer").refusals == {"parcels": "no such queue"}

    def test_has_the_handler_that_runs_and_its_message(self, broker):
        running: list[dict[str, object]] = []

        @consumer(Placed, group="cart", time_limit=timedelta(seconds=90))
        def beat(message, context):
            subscriptions.beat(group("cart"), "default")
            running.append(Process.objects.get(kind="consumer").handling)

        sent = outgoing(Placed("A1"))
        broker.send([sent])
        with closing(Worker(group("cart"), "default")) as worker:
            worker.step(NO_WAIT)
            subscriptions.beat(worker.group, worker.alias)

        [one] = running
        assert (one["topic"], one["message_id"], one["limit_seconds"]) == (sent.topic, sent.message_id, 90)
        assert one["handler"].endswith(".beat")
        assert Process.objects.get(kind="consumer").handling == {}

    def test_has_nothing_of_a_client_that_was_closed(self, worker, broker, monkeypatch):
        monkeypatch.setattr(MemoryBroker, "refusals", {"parcels": "no such queue"})
        worker.step(NO_WAIT)

        worker.close()
        subscriptions.beat(worker.group, worker.alias)

        assert Process.objects.get(kind="consumer").refusals == {}


class TestWorker:
    def test_applies_and_acknowledges_what_comes(self, worker, broker):
        broker.send([outgoing(Placed(invoice)) for invoice in ("A1", "A2")])

        received = worker.step(NO_WAIT)

        assert received == 2
        assert applied() == ["A1", "A2"]
        assert broker.backlog("cart").waiting == {"orders": 0}

    def test_asks_for_due_messages_with_one_statement_while_none_is(self, worker, asked):
        worker.step(NO_WAIT)
        worker._due_at = 0.0
        asked.clear()

        worker.step(NO_WAIT)

        assert [query for query, _ in asked if "outbox_deferred" in str(query)] == [deferred.CHECK_DUE]

    def test_drops_a_copy_of_a_message(self, worker, broker):
        twin = outgoing(Placed("A1"))
        broker.send([twin, twin, twin])

        counts = worker.run(until_idle=True)

        assert (counts.handled, counts.duplicates) == (1, 2)
        assert applied() == ["A1"]
        assert broker.backlog("cart").waiting == {"orders": 0}

    def test_retries_by_the_policy_then_gives_up_while_others_go_on(self, worker, broker, clock, dead_lettered):
        broker.send([outgoing(Placed("bad")), outgoing(Placed("A1"))])

        for _ in range(3):
            worker.step(NO_WAIT)
            assert worker.step(NO_WAIT) == 0, "not before its delay"
            end_delays()
            worker._due_at = 0.0

        assert applied() == ["A1"]
        assert (worker.counts.deferred, worker.counts.dead_letters) == (2, 1)
        assert errors() == ["ValueError: bad"]
        assert "ValueError: bad" in dead_lettered[0]["reason"]
        assert dead_lettered[0]["group"] == "cart"

    def test_finishes_its_message_and_defers_the_rest_when_stopped(self, broker, worker):
        @consumer(Placed, group="points")
        def stop(message, context):
            CartEntry.objects.create(invoice=message.invoice, change=1)
            points.stop()

        points = Worker(group("points"), "default")
        broker.send([outgoing(Placed(invoice)) for invoice in ("A1", "A2")])

        points.run()

        assert applied() == ["A1"]
        assert broker.backlog("points").waiting == {"orders": 0}
        assert [row.reason for row in Deferred.objects.all()] == ["stop"]

    def test_takes_fewer_when_its_handler_is_slow(self, worker, broker, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"INVISIBLE": timedelta(seconds=0.05)}}

        @consumer(Placed, group="slow")
        def dawdle(message, context):
            threading.Event().wait(0.03)

        slow = Worker(group("slow"), "default")
        broker.send([outgoing(Placed("A1"))])
        assert slow.step(NO_WAIT) == 1
        broker.send([outgoing(Placed(invoice)) for invoice in ("A2", "A3")])

        assert slow.step(NO_WAIT) == 1

    @pytest.mark.parametrize(("seconds", "messages"), [(0, 32), (0.25, 4), (10, 1)])
    def test_takes_what_is_handled_before_it_would_be_deferred(self, seconds, messages):
        assert affordable(32, timedelta(minutes=1), seconds) == messages

    def test_acknowledges_what_was_done_before_it_is_broken_off(self, worker, broker, clock, monkeypatch):
        monkeypatch.setenv(VARIABLE, "consumer.before_handler=raise@2")
        monkeypatch.setattr(failpoints, "_passes", Counter())
        broker.send([outgoing(Placed(invoice)) for invoice in ("A1", "A2")])

        with pytest.raises(FailpointReached):
            worker.step(NO_WAIT)

        assert broker.backlog("cart").waiting == {"orders": 1}

    def test_makes_a_new_broker_after_trouble_with_it(self, worker, broker, monkeypatch):
        troubles = [BrokerUnavailable("gone"), BrokerUnavailable("still gone")]
        receive = MemoryBroker.receive
        brokers = []

        def fail_twice(self, *args, **kwargs):
            brokers.append(self)
            if troubles:
                raise troubles.pop()
            return receive(self, *args, **kwargs)

        monkeypatch.setattr(MemoryBroker, "receive", fail_twice)
        monkeypatch.setattr(worker_module, "BACKOFF", Backoff(*[timedelta(seconds=0.01)] * 2, lambda: 1.0))
        broker.send([outgoing(Placed("A1"))])

        worker.run(until_idle=True)

        assert applied() == ["A1"]
        assert len(set(map(id, brokers[:3]))) == 3

    @pytest.mark.parametrize(
        ("error", "level", "is_traced"),
        [(BrokerUnavailable("gone"), "WARNING", False), (ZeroDivisionError("ours"), "ERROR", True)],
    )
    def test_logs_an_outage_in_a_line_and_a_fault_of_ours_with_its_trace(
        self, worker, monkeypatch, caplog, error, level, is_traced
    ):
        troubles = [error]
        receive = MemoryBroker.receive

        def fail_once(self, *args, **kwargs):
            if troubles:
                raise troubles.pop()
            return receive(self, *args, **kwargs)

        monkeypatch.setattr(MemoryBroker, "receive", fail_once)
        monkeypatch.setattr(worker_module, "BACKOFF", Backoff(*[timedelta(seconds=0.01)] * 2, lambda: 1.0))

        worker.run(until_idle=True)

        (record,) = caplog.records
        assert (record.levelname, bool(record.exc_info)) == (level, is_traced)

    def test_returns_in_time(self, worker):
        assert worker.run(seconds=0.05).handled == 0

    def test_serves_a_group_over_two_brokers(self, worker, settings):
        consumer(topic="elsewhere", group="cart")(lambda message, context: None)
        conf.make_broker("second").send([outgoing(Placed("A1"), topic="elsewhere")])

        second = Worker(group("cart"), "second")
        second.run(until_idle=True)

        assert second.counts.handled == 1
        assert Inbox.objects.get().topic == "elsewhere"

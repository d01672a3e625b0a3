"""Two releases of a group side by side: what one has a handler for and the other has not is deferred for it."""

from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.utils.timezone import now

from outbox import consumer, database
from outbox.brokers.memory import MemoryBroker
from outbox.consuming import register, subscriptions
from outbox.consuming.delivery_info import DeliveryInfo
from outbox.consuming.handle import handle
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import Group, group
from outbox.consuming.worker import Worker
from outbox.database import heartbeats
from outbox.message import Header
from outbox.models import Deferred, Duplicate, FailedDelivery, Inbox, Process
from outbox.monitoring.attention import read_attention
from outbox.testing.factories import InboxFactory
from tests.outbox.consuming.deliveries import delivery, numbered, outgoing, run_due
from tests.outbox.consuming.messages import Cancelled, Placed

pytestmark = pytest.mark.django_db


def takes(*types, **options) -> None:
    consumer(*types, group="cart", **options)(lambda message, context: None)


def other_release(monkeypatch, *types, **options) -> None:
    """Another process of the group lives, whose code is another."""
    with monkeypatch.context() as patch:
        patch.setattr(register, "registered", {})
        patch.setattr(heartbeats, "_random_id", "elsewhere")  # in a container of the same host name and process id
        takes(*types, **options)
        subscriptions.beat(group("cart"), "default")


class TestOtherRelease:
    def test_has_a_type_more(self, monkeypatch):
        takes(Placed)
        other_release(monkeypatch, Placed, Cancelled)

        result = handle(group("cart"), delivery(Cancelled("A1")))

        assert result.outcome is Outcome.DEFERRED
        assert not Inbox.objects.exists()
        assert Deferred.objects.get().reason == "no handler"
        assert run_due() == []
        takes(Cancelled)
        assert run_due() == [Outcome.HANDLED]

    def test_has_a_type_that_this_one_does_not_even_define(self, monkeypatch):
        takes(Placed)
        other_release(monkeypatch, Placed, Cancelled)
        cancelled = delivery(Cancelled("A1"), headers={Header.TYPE: "tests.Gone"})
        Process.objects.update(
            subscriptions=[text.replace("tests.Cancelled", "tests.Gone") for text in Process.objects.get().subscriptions]
        )

        result = handle(group("cart"), cancelled)

        assert result.outcome is Outcome.DEFERRED
        assert Deferred.objects.get().failures == 0

    @pytest.mark.parametrize(("tag", "outcome"), [("placed", Outcome.DEFERRED), ("returned", Outcome.IGNORED)])
    def test_takes_other_tags(self, monkeypatch, tag, outcome):
        takes(Placed, tags={"wholesale"})
        other_release(monkeypatch, Placed, tags={"wholesale", "placed"})

        assert handle(group("cart"), delivery(Placed("A1"), tag=tag)).outcome is outcome

    def test_takes_the_whole_topic(self, monkeypatch):
        takes(Placed)
        other_release(monkeypatch, topic="orders")

        assert handle(group("cart"), delivery(Cancelled("A1"))).outcome is Outcome.DEFERRED

    def test_takes_the_type_on_another_topic(self, monkeypatch):
        takes(Placed)
        other_release(monkeypatch, Cancelled)

        assert handle(group("cart"), delivery(Cancelled("A1"), topic="elsewhere")).outcome is Outcome.IGNORED

    @pytest.mark.parametrize(
        ("process", "outcome"),
        [
            ({"beat_at": Now() - timedelta(minutes=10)}, Outcome.DEFERRED),  # its handler is at work
            ({"beat_at": "2020-01-01T00:00:00Z"}, Outcome.IGNORED),
            ({"consumer_group": "points"}, Outcome.IGNORED),
        ],
        ids=["silent for minutes", "silent for long", "of another group"],
    )
    def test_counts_while_one_of_its_processes_may_live(self, monkeypatch, process, outcome):
        takes(Placed)
        other_release(monkeypatch, Placed, Cancelled)
        Process.objects.update(**process)

        assert handle(group("cart"), delivery(Cancelled("A1"))).outcome is outcome

    def test_has_been_silent_as_long_as_this_one_since_the_database_was_away(self, monkeypatch):
        takes(Placed)
        other_release(monkeypatch, Placed, Cancelled)
        Process.objects.update(beat_at=now() - timedelta(minutes=40), host="elsewhere")
        monkeypatch.setattr(subscriptions, "_beats", {})
        assert handle(group("cart"), delivery(Cancelled("A1"))).outcome is Outcome.IGNORED

        subscriptions.beat(group("cart"), "default")

        assert handle(group("cart"), delivery(Cancelled("A2"))).outcome is Outcome.DEFERRED


class TestMessageOfTheOtherRelease:
    """It comes again, here, though the group needs nothing more of it."""

    @pytest.fixture(autouse=True)
    def _releases(self, monkeypatch):
        takes(Placed)
        other_release(monkeypatch, Placed, Cancelled)

    def test_is_dropped_where_the_group_has_handled_it(self):
        again = delivery(Cancelled("A1"), delivery_count=2)
        InboxFactory(consumer_group="cart", message_id=DeliveryInfo.of(again).message_id, idempotency_key="its handler's own")

        assert handle(group("cart"), again).outcome is Outcome.DUPLICATE
        assert Duplicate.objects.get().delivery_count == 2

    def test_is_dropped_where_it_is_deferred(self):
        again = delivery(Cancelled("A1"))

        outcomes = [handle(group("cart"), again).outcome for _ in range(2)]

        assert outcomes == [Outcome.DEFERRED, Outcome.DUPLICATE]

    def test_is_deferred_in_doubt_where_it_was_delivered_before(self):
        handle(group("cart"), delivery(Cancelled("A1"), delivery_count=2))

        assert Deferred.objects.get().crashes == 1

    def test_of_an_undefined_type_is_dropped_where_the_group_has_handled_it(self):
        Process.objects.update(
            subscriptions=[text.replace("tests.Cancelled", "tests.Gone") for text in Process.objects.get().subscriptions]
        )
        again = delivery(Cancelled("A1"), headers={Header.TYPE: "tests.Gone"})
        InboxFactory(consumer_group="cart", message_id=DeliveryInfo.of(again).message_id)

        assert handle(group("cart"), again).outcome is Outcome.DUPLICATE
        assert not FailedDelivery.objects.exists()


class TestWorker:
    def test_writes_its_subscriptions_before_it_receives(self, broker):
        takes(Placed)
        takes_all = Worker(group("cart"), "default")

        takes_all.step(timedelta(0))

        (process,) = Process.objects.all()
        assert (process.kind, process.consumer_group, process.broker) == ("consumer", "cart", "default")
        assert process.subscriptions == subscriptions.subscriptions_of(group("cart"))

    def test_ignores_together_what_nobody_takes_and_defers_what_others_take(self, broker, monkeypatch, clock):
        takes(Placed)
        other_release(monkeypatch, Placed, Cancelled)
        plain = [outgoing(Placed(f"A{n}"), headers={Header.TYPE: "tests.Ignored", **numbered(n)}) for n in range(3)]
        broker.send([*plain, outgoing(Cancelled("A1")), outgoing(Placed("A2"))])
        worker = Worker(group("cart"), "default")

        worker.step(timedelta(0))

        counts = worker.counts
        assert (counts.handled, counts.ignored, counts.deferred) == (1, 3, 1)
        assert broker.backlog("cart").waiting == {"orders": 0}
        assert set(Inbox.objects.exclude(number=None).values_list("number", flat=True)) == {0, 1, 2}


def test_processes_that_differ_for_long_need_attention(monkeypatch):
    takes(Placed)
    subscriptions.beat(group("cart"), "default")
    other_release(monkeypatch, Placed, Cancelled)

    assert subscriptions.differing_groups(database.raw("default")) == []
    Process.objects.update(started_at="2020-01-01T00:00:00Z")

    assert subscriptions.differing_groups(database.raw("default")) == ["cart"]
    found = read_attention(database.raw("default"), "default")
    assert "group 'cart'" in [one.obj for one in found if one.id == "outbox.code_differs"]


def test_subscriptions_of_a_group_name_topic_subject_and_tag():
    def handler(message, context):
        pass

    consumer(Placed, group="cart", tags={"b", "a"})(handler)

    found = subscriptions.subscriptions_of(Group("cart", group("cart").consumers))

    assert [text.split("\x1f") for text in found] == [["orders", "tests.Placed", "a"], ["orders", "tests.Placed", "b"]]


def test_messages_of_another_release_keep_their_place_in_a_key(monkeypatch, fifo):
    handled: list[str] = []
    consumer(Placed, group="cart")(lambda message, context: handled.append(message.invoice))
    other_release(monkeypatch, Placed, Cancelled)
    deliveries = [
        delivery(Placed("A1"), key="A"),
        delivery(Cancelled("A2"), key="A"),
        delivery(Placed("A3"), key="A"),
        delivery(Placed("B1"), key="B"),
    ]
    monkeypatch.setattr(MemoryBroker, "receive", lambda *arguments, **named: deliveries)
    monkeypatch.setattr(MemoryBroker, "ack", lambda broker, given: [True] * len(given))

    Worker(group("cart"), "default").step(timedelta(0))

    assert handled == ["A1", "B1"]
    assert list(Deferred.objects.order_by("id").values_list("reason", flat=True)) == ["no handler", "behind"]
    takes_cancelled = consumer(Cancelled, group="cart")
    takes_cancelled(lambda message, context: handled.append(message.invoice))
    assert run_due() == [Outcome.HANDLED] * 2
    assert handled == ["A1", "B1", "A2", "A3"]

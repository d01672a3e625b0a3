from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db import connections
from django.test import RequestFactory
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from outbox import conf, consumer
from outbox.brokers.base import Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.consuming import register
from outbox.embedded.models import EmbeddedHalf, EmbeddedTopic, HalfState
from outbox.errors import BrokerUnavailable
from outbox.ids import topic_number
from outbox.message import Message
from outbox.models import Gap, Process, State, Topic
from outbox.monitoring import metrics
from outbox.monitoring.metrics import OutboxCollector
from outbox.testing.factories import DeferredFactory
from tests.factories import BatchFactory, DelayedFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id
from tests.outbox.monitoring.times import ago

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


class Parcel(Message):
    number: int

    class Meta:
        topic = "parcels"


@pytest.fixture(autouse=True)
def _clean_slate(settings, monkeypatch, db):
    memory = {"BACKEND": "outbox.brokers.memory.MemoryBroker", "OPTIONS": {"NAME": uuid4().hex}}
    settings.OUTBOX = {"TOPICS": {"parcels": {"TYPE": "normal"}}, "BROKERS": {"default": memory}}
    monkeypatch.setattr(register, "registered", {})
    Topic.objects.all().delete()


@pytest.fixture
def scrape():
    """Scrape like Prometheus; return one metric of the default database: {values of the labels: value}."""

    def scrape(name, *labels):
        text = metrics.view(RequestFactory().get("/metrics/")).content.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = [one for one in families[name].samples if "database" in labels or one.labels.get("database") != "other"]
        return {tuple(sample.labels[label] for label in labels): sample.value for sample in samples}

    return scrape


class TestMessages:
    def test_are_counted_by_where_they_stand(self, scrape):
        topic = TopicFactory(name="parcels")
        TicketFactory.create_batch(2, topic=topic)
        DelayedFactory(topic=topic)
        for size, state in enumerate([State.RELEASED, State.CLAIMED, State.PREPARED, State.DEAD], 3):
            BatchFactory(topic=topic, size=size, state=state)

        found = scrape("outbox_messages", "topic", "state")

        counts = {state: found["parcels", state] for state in metrics.STATES}
        assert counts == {"waiting": 2, "delayed": 1, "released": 3, "claimed": 4, "prepared": 5, "dead": 6}

    def test_have_the_age_of_the_oldest(self, scrape):
        topic = TopicFactory(name="parcels")
        old = MessageRowFactory(topic=topic, id=message_id(datetime.now(UTC) - timedelta(seconds=50)))
        TicketFactory(topic=topic, message=old)

        assert scrape("outbox_oldest_message_seconds", "topic")["parcels",] == pytest.approx(50, abs=5)

    def test_of_a_paused_topic_are_known_by_it(self, scrape):
        TopicFactory(name="parcels", paused=True)
        TopicFactory(name="letters")

        assert scrape("outbox_topic_paused", "topic") == {("parcels",): 1, ("letters",): 0}


class TestProcesses:
    def test_are_counted_while_they_are_heard_of(self, scrape):
        for pid in (1, 2, 3):
            Process.objects.create(kind="relay", host="h", pid=pid, broker="default")
        Process.objects.filter(pid=3).update(beat_at=datetime.now(UTC) - timedelta(seconds=40))

        assert scrape("outbox_processes", "kind", "consumer_group") == {("relay", ""): 2}

    def test_that_are_all_silent_are_none(self, scrape):
        Process.objects.create(kind="consumer", host="h", pid=1, broker="default", consumer_group="cart")
        Process.objects.update(beat_at=datetime.now(UTC) - timedelta(seconds=40))

        assert scrape("outbox_processes", "kind", "consumer_group") == {("consumer", "cart"): 0}

    def test_say_that_their_broker_is_unavailable(self, scrape):
        TopicFactory(name="parcels")
        Process.objects.create(kind="relay", host="h", pid=1, broker="default", breaker="open")

        assert scrape("outbox_breakers_open", "broker") == {("default",): 1}


class TestAttention:
    def test_are_counted(self, scrape):
        BatchFactory(topic=TopicFactory(name="parcels"), state=State.DEAD)

        found = scrape("outbox_findings", "id", "level", "subject")

        assert found["outbox.rejected", "warning", "topic 'parcels'"] == 1

    def test_name_what_a_group_misses(self, scrape):
        Gap.objects.create(consumer_group="cart", topic="parcels", source="s", lane=1, first_number=3, last_number=5)

        assert scrape("outbox_missing_numbers", "consumer_group", "topic") == {("cart", "parcels"): 3}

    def test_count_parked_halves(self, scrape, settings):
        settings.OUTBOX = {"TOPICS": {"parcels": {"TYPE": "transaction"}}}
        topic = EmbeddedTopic.objects.create(id=topic_number("parcels"), name="parcels", type="transaction", queues=1)
        times = {"born_at": datetime.now(UTC), "ask_at": datetime.now(UTC)}
        EmbeddedHalf.objects.create(
            id=1, topic_id=topic.id, queue=0, message_id="m", headers="{}", body=b"", state=HalfState.PARKED, **times
        )

        assert scrape("outbox_parked_halves", "topic") == {("parcels",): 1}


class TestBacklogs:
    @pytest.fixture(autouse=True)
    def _a_group(self, _clean_slate):
        consumer(Parcel, group="cart")(lambda message, context: None)

    def test_come_from_the_broker(self, scrape):
        broker = conf.make_broker("default")
        broker.receive("cart", {"parcels": None}, limit=1, invisible_for=timedelta(seconds=1), wait=timedelta(0))
        broker.send([Outgoing(name, "parcels", b"{}") for name in "ab"])

        assert scrape("outbox_backlog_messages", "consumer_group", "topic") == {("cart", "parcels"): 2}
        assert scrape("outbox_backlog_up", "consumer_group") == {("cart",): 1}

    def test_show_a_broker_that_does_not_answer(self, scrape, monkeypatch):
        def refuse(broker, group):
            raise BrokerUnavailable("nobody answers")

        monkeypatch.setattr(MemoryBroker, "backlog", refuse)

        assert scrape("outbox_backlog_messages", "consumer_group", "topic") == {}
        assert scrape("outbox_backlog_up", "consumer_group") == {("cart",): 0}

    def test_count_deferred_messages_by_reason_and_state(self, scrape):
        DeferredFactory.create_batch(3, consumer_group="cart", topic="parcels", dead=True, body=b"12345678")
        DeferredFactory(consumer_group="cart", topic="parcels", reason="stop", due_at=ago(seconds=30), body=b"12345678")

        found = scrape("outbox_deferred_messages", "consumer_group", "topic", "reason", "state")

        assert {place: number for place, number in found.items() if number} == {
            ("cart", "parcels", "failed", "dead"): 3,
            ("cart", "parcels", "stop", "waiting"): 1,
        }
        assert 30 <= scrape("outbox_deferred_late_seconds", "consumer_group", "topic")["cart", "parcels"] < 60
        assert scrape("outbox_deferred_bytes", "consumer_group", "topic") == {("cart", "parcels"): 40}


class TestDatabases:
    def test_that_cannot_be_asked_are_down_and_hide_no_other(self, scrape, monkeypatch):
        TopicFactory(name="parcels")
        other = connections["other"].get_connection_params()
        monkeypatch.setattr(connections["other"], "get_connection_params", lambda: {**other, "host": "127.0.0.1", "port": 1})

        assert scrape("outbox_database_up", "database") == {("default",): 1, ("other",): 0}
        assert ("parcels",) in scrape("outbox_topic_paused", "topic")


class TestOutboxCollector:
    def test_asks_nobody_when_it_is_registered(self, monkeypatch):
        monkeypatch.setattr(metrics, "databases", lambda: pytest.fail("asked"))

        CollectorRegistry().register(OutboxCollector())

    def test_is_shown_outside_transactions(self, client, monkeypatch):
        seen = {}

        def look():
            seen.update({alias: connections[alias].in_atomic_block for alias in connections})
            return []

        monkeypatch.setattr(metrics, "databases", look)
        for alias in connections:
            monkeypatch.setitem(connections[alias].settings_dict, "ATOMIC_REQUESTS", True)

        client.get("/metrics/")

        assert seen == {"default": False, "other": False}

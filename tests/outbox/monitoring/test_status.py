from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from outbox import consumer, database
from outbox.database.partitions import create_partition
from outbox.models import FailedDelivery, Process, State, Topic
from outbox.monitoring.connection import bounded
from outbox.monitoring.status import read_status
from outbox.monitoring.text import age
from outbox.testing.factories import DeferredFactory
from tests.factories import BatchFactory, DelayedFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id
from tests.outbox.monitoring.times import ago

pytestmark = pytest.mark.django_db


@pytest.fixture
def read(db, settings):
    create_partition(database.raw("default"), ago(days=1).date())  # soon after midnight, what is an hour old is of that day

    def read():
        """Return the status, with the topics of the test in settings."""
        made = {name: {} for name in Topic.objects.values_list("name", flat=True)}
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {**made, **settings.OUTBOX["TOPICS"]}}
        connection = database.raw("default")
        with bounded("default", connection):
            return read_status(connection, "default")

    return read


@pytest.fixture
def topic_of(read):
    def topic_of(topic):
        (found,) = [one for one in read().topics if one.name == topic.name]
        return found

    return topic_of


def a_relay(broker="default", **fields):
    return Process.objects.create(kind="relay", host="h", pid=1, broker=broker, **fields)


class TestTopics:
    def test_count_messages_by_where_they_stand(self, topic_of):
        topic = TopicFactory()
        TicketFactory.create_batch(2, topic=topic)
        DelayedFactory(topic=topic)
        BatchFactory(topic=topic, size=3, state=State.RELEASED)
        BatchFactory(topic=topic, size=4, state=State.CLAIMED)
        BatchFactory(topic=topic, size=5, state=State.PREPARED)
        BatchFactory(topic=topic, size=6, state=State.DEAD)
        BatchFactory(topic=topic, size=7, state=State.SENT)

        found = topic_of(topic)

        counts = (found.waiting, found.delayed, found.released, found.claimed, found.prepared, found.dead)
        assert counts == (2, 1, 3, 4, 5, 6)

    def test_do_not_count_what_was_split_off(self, topic_of):
        topic = TopicFactory()
        BatchFactory(topic=topic, size=3, state=State.DEAD, split=[1, 3])

        assert topic_of(topic).dead == 1

    @pytest.mark.parametrize("is_claimed", [False, True])
    def test_know_the_age_of_the_oldest_that_is_to_be_sent(self, is_claimed, topic_of):
        topic = TopicFactory()
        old = MessageRowFactory(topic=topic, id=message_id(ago(seconds=50)))
        TicketFactory(topic=topic)
        if is_claimed:
            BatchFactory(topic=topic, message_ids=[old.id], state=State.RELEASED)
        else:
            TicketFactory.create(topic=topic, message=old)

        seconds = topic_of(topic).oldest_seconds

        assert seconds == (pytest.approx(50, abs=5) if is_claimed else pytest.approx(0, abs=5))

    @pytest.mark.parametrize("behind", [timedelta(hours=1), timedelta(hours=-1)])
    def test_have_ages_by_the_clock_of_the_database_whatever_that_of_the_publisher_is(self, behind, topic_of):
        topic = TopicFactory()
        old = MessageRowFactory(topic=topic, id=message_id(datetime.now(UTC) - behind), created_at=ago(seconds=50))
        TicketFactory(topic=topic, message=old)

        assert topic_of(topic).oldest_seconds == pytest.approx(50, abs=5)

    def test_have_no_age_when_nothing_waits(self, topic_of):
        topic = TopicFactory()
        BatchFactory(topic=topic, state=State.SENT)
        DelayedFactory(topic=topic)

        assert topic_of(topic).oldest_seconds is None


def a_failure(**fields):
    about = {"consumer_group": "cart", "topic": "orders", "delivery_count": 1, "source": "s"}
    return FailedDelivery.objects.create(**{"message_id": uuid4(), "outcome": "retry", "fingerprint": "Error", **about, **fields})


class TestFailures:
    def test_that_look_alike_are_counted_together(self, read):
        one = a_failure()
        a_failure(message_id=one.message_id, delivery_count=2)
        a_failure(outcome="dead letter")
        a_failure(fingerprint="Another")

        together, other = read().failures

        assert (together.consumer_group, together.topic, together.error) == ("cart", "orders", "Error")
        assert (together.deliveries, together.messages, together.dead_letters) == (3, 2, 1)
        assert (other.error, other.deliveries) == ("Another", 1)

    def test_of_long_ago_are_left_out(self, read):
        FailedDelivery.objects.filter(id=a_failure().id).update(failed_at=ago(hours=2))

        assert read().failures == []


class TestBrokers:
    def test_are_left_out_where_their_client_is_not_installed(self, read, settings):
        away = {"default": {"BACKEND": "no.such.Broker"}}
        settings.OUTBOX = {"BROKERS": away, "TOPICS": {"orders": {"TYPE": "normal"}}}

        assert (read().parked, read().deferred) == ({}, [])


class TestDeferred:
    def test_are_counted_for_each_group_topic_and_reason(self, read):
        for fields in ({"dead": True}, {"waiting": True, "failures": 1}, {"held": True}, {"crashes": 1}):
            DeferredFactory(consumer_group="cart", body=b"12345", headers="{}", **fields)
        DeferredFactory(consumer_group="cart", asleep=True)
        DeferredFactory(consumer_group="points", topic="bills", due_at=ago(seconds=30))

        cart, behind, failed, _, points = read().deferred

        assert (behind.consumer_group, behind.topic, behind.reason) == ("cart", "orders", "behind")
        assert (behind.waiting, behind.asleep) == (1, 1)
        assert (failed.reason, failed.waiting, failed.held, failed.dead, failed.in_doubt) == ("failed", 2, 1, 1, 1)
        assert (failed.failing, failed.counted, failed.bytes) == (1, 2, 4 * 7)
        assert (cart.reason, cart.waiting, cart.held, cart.dead) == ("", 3, 1, 1)
        assert (points.topic, points.reason, points.dead) == ("bills", "failed", 0)
        assert 30 <= points.late_seconds < 40

    def test_are_those_of_a_group_at_its_broker(self, read, no_consumers):
        consumer(topic="orders", group="cart")(lambda message, context: None)
        DeferredFactory(consumer_group="cart", dead=True)
        DeferredFactory(consumer_group="cart", asleep=True)

        [group] = [one for one in read().groups if one.consumer_group == "cart"]

        assert {topic: (count.waiting, count.dead) for topic, count in group.deferred.items()} == {"orders": (1, 1)}


class TestOverAConnectionOfThePages:
    def test_is_not_compiled_which_takes_longer_than_reading_it(self):
        connection = database.raw("default")
        connection.execute("SET LOCAL jit = on")

        with bounded("default", connection):
            assert connection.execute("SHOW jit").fetchone() == ("off",)


class TestAge:
    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(None, ""), (0.44, "0.4 s"), (45, "45 s"), (200, "3 min"), (7300, "2 h"), (259200, "3 d")],
    )
    def test_is_put_into_words(self, seconds, words):
        assert age(seconds) == words

"""The relay and the sweep on a real RocketMQ, each type of topic from publish() on."""

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from outbox import atomic, conf, database, publish_raw
from outbox.brokers.base import Broker, Delivery
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.message import COMMIT, Half, Header, Resolution, TopicSpec, TopicType
from outbox.models import Batch, State, Topic
from outbox.relay.commit import SweepResult
from outbox.relay.rounds import Relay
from project.servers.rocketmq import FAST_CHECKS, RocketMQ
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.factories import BatchFactory, TicketFactory, TopicFactory, stored
from tests.outbox.brokers.rocketmq.log import copies
from tests.waiting import wait_until

DISCARDED = "TRANS_CHECK_MAX_TIME_TOPIC"  # what the server has asked about in vain

HALF, NORMAL, FIFO, DELAY = TopicType.TRANSACTION, TopicType.NORMAL, TopicType.FIFO, TopicType.DELAY

pytestmark = pytest.mark.django_db


@pytest.fixture
def connection() -> database.Connection:
    return database.raw("default")


def relay(connection: database.Connection, broker: Broker) -> Relay:
    return Relay(connection, broker, 1, settings=conf.RelaySettings(sweep_age=timedelta(0)))


def arrived(acts: Acts, count: int, kind: TopicType = HALF) -> list[Delivery]:
    found: list[Delivery] = []
    wait_until(lambda: found.extend(acts.receive(kind)) or len({one.message_id for one in found}) >= count, 60)
    return found


class TestTransactionTopic:
    def test_gets_a_batch_once_and_numbered(self, acts: Acts, broker: Broker, topic: Topic, connection: database.Connection):
        tickets = TicketFactory.create_batch(100, topic=topic)

        drained = relay(connection, broker).drain()

        assert (drained.sent, drained.unaccepted) == (100, 0)
        found = arrived(acts, 100)
        assert sorted(one.message_id for one in found) == sorted(str(ticket.message_id) for ticket in tickets)
        assert sorted(int(one.headers[Header.NUMBER]) for one in found) == list(range(1, 101))
        assert Batch.objects.get().state == State.SENT

    def test_delivers_all_tags_and_says_which(self, acts: Acts, broker: Broker, topic: Topic, connection: database.Connection):
        for tag in ("placed", "cancelled", "placed"):
            with atomic():
                publish_raw(topic.name, tag.encode(), tag=tag)

        relay(connection, broker).drain()

        assert sorted((one.tag, one.body) for one in arrived(acts, 3)) == [
            ("cancelled", b"cancelled"),
            ("placed", b"placed"),
            ("placed", b"placed"),
        ]


class TestOnePhaseTopics:
    def test_get_each_message_as_it_was_published(
        self, acts: Acts, harness: RocketMQHarness, topic: Topic, connection: database.Connection
    ):
        due_at = timezone.now() + timedelta(seconds=2)
        with atomic():
            publish_raw(acts.harness.topic(NORMAL), b"x" * 10_000, key="4711", tag="placed", headers={"who": "Zoë"})
            publish_raw(acts.harness.topic(DELAY), b"later", delay=timedelta(seconds=2))

        options = {**harness.options(), "COMPRESS_ABOVE_BYTES": 4096}
        with closing(RocketMQBroker("default", options, list(harness.topics.values()))) as punctual:
            drained = relay(connection, punctual).drain()

        assert drained.sent == 2
        [normal] = arrived(acts, 1, NORMAL)
        assert (normal.body, normal.key, normal.tag, normal.headers["who"]) == (b"x" * 10_000, "4711", "placed", "Zoë")
        [delayed] = arrived(acts, 1, DELAY)
        assert delayed.body == b"later"
        assert timezone.now() >= due_at

    def test_keep_the_order_of_each_key(self, acts: Acts, broker: Broker, topic: Topic, connection: database.Connection):
        keys = ["a", "ключ", "two words", "long " * 30]  # the last two are no message groups as they are
        for number in range(4):
            for key in keys:
                with atomic():
                    publish_raw(acts.harness.topic(FIFO), b"%d" % number, key=key)

        drained = relay(connection, broker).drain()

        found: dict[str, list[bytes]] = {key: [] for key in keys}

        def take() -> bool:
            deliveries = acts.receive(FIFO)
            for delivery in deliveries:
                found[delivery.key].append(delivery.body)
            broker.ack(deliveries)
            return all(len(bodies) == 4 for bodies in found.values())

        wait_until(take, 60)
        assert drained.sent == 16
        assert list(found.values()) == [[b"0", b"1", b"2", b"3"]] * len(keys)


class TestTopicThatIsNotAsSettingsSay:
    @pytest.mark.parametrize(
        ("kind", "words"), [(None, "40402"), (NORMAL, "does not accept messages of type")], ids=["missing", "of another type"]
    )
    def test_has_its_messages_wait_and_says_why(
        self, harness: RocketMQHarness, connection: database.Connection, kind: TopicType | None, words: str
    ):
        name = harness.topic(kind) if kind else "nowhere"
        TicketFactory.create_batch(3, topic=TopicFactory(name=name, type="transaction"))
        spec = TopicSpec(name, HALF)

        with closing(RocketMQBroker("default", harness.options(), [spec])) as broker:
            relay(connection, broker).drain()
            problems = [problem.text for problem in broker.check() if "Topic" in problem.text]

        batch = Batch.objects.get()
        assert (batch.state, batch.failures) == (State.RELEASED, 0)
        assert words in batch.last_error
        assert batch.due_at > timezone.now() + timedelta(seconds=10)
        assert len(problems) == 1


class TestSweep:
    """Settles what a relay left behind that died between its decision and its commits."""

    def test_commits_where_it_is_stored_what_nobody_committed(
        self, harness: RocketMQHarness, topic: Topic, connection: database.Connection, decided: Callable[[], str]
    ):
        message_id = decided()

        swept(relay(connection, harness.open()), "sent")

        wait_until(lambda: copies(topic.name, message_id), 60)
        assert copies(topic.name, message_id) == 1

    def test_commits_what_the_server_discarded_after_its_last_question(
        self,
        harness: RocketMQHarness,
        topic: Topic,
        connection: database.Connection,
        server: RocketMQ,
        decided: Callable[[], str],
    ):
        server.set("transactionCheckMax", 2)
        server.set("transactionTimeOut", 500)
        message_id = decided()
        asked: list[int] = []

        def fail(half: Half) -> Resolution:
            asked.append(half.asked)
            raise ConnectionError("no database")

        harness.open().listen(fail)
        wait_until(lambda: 2 in asked, 60)
        wait_until(lambda: copies(DISCARDED, message_id), 60)
        before = copies(topic.name, message_id)
        swept(relay(connection, harness.open()), "sent")

        assert before == 0
        wait_until(lambda: copies(topic.name, message_id), 60)
        assert copies(topic.name, message_id) == 1
        assert max(asked) == 2

    def test_finds_what_the_check_back_committed(
        self,
        harness: RocketMQHarness,
        topic: Topic,
        connection: database.Connection,
        server: RocketMQ,
        decided: Callable[[], str],
    ):
        server.set("transactionTimeOut", 500)
        message_id = decided()
        harness.open().listen(lambda half: COMMIT)
        wait_until(lambda: copies(topic.name, message_id), 60)
        before = copies(topic.name, message_id)

        result = swept(relay(connection, harness.open()), "sent")

        assert result.returned == 0
        assert copies(topic.name, message_id) == before

    def test_sends_again_what_the_server_does_not_have(
        self, harness: RocketMQHarness, topic: Topic, connection: database.Connection
    ):
        lost = {"half_ids": ["lost.1"], "half_places": ["broker-a 123456789012 0"]}
        batch = BatchFactory(topic=topic, state=State.PREPARED, decided_at=datetime.now(UTC), **lost)
        running = relay(connection, harness.open())

        swept(running, "returned")
        running.drain()

        wait_until(lambda: copies(topic.name, str(batch.message_ids[0])) == 1, 60)
        assert stored(batch).state == State.SENT

    def test_leaves_to_an_operator_what_is_older_than_all_that_the_server_keeps(
        self, harness: RocketMQHarness, topic: Topic, connection: database.Connection
    ):
        then = datetime.now(UTC) - timedelta(days=1)
        batch = BatchFactory(topic=topic, state=State.PREPARED, half_ids=["lost.1"], decided_at=then)

        swept(relay(connection, harness.open()), "dead")

        assert stored(batch).state == State.DEAD


def swept(relay: Relay, what: str) -> SweepResult:
    """Sweep until something was settled so: when nobody else may end it any more, and the broker has answered for a while."""

    def sweep() -> SweepResult | None:
        Batch.objects.update(ends_until=datetime.now(UTC) - timedelta(minutes=1))
        result = relay.sweep()
        return result if getattr(result, what) else None

    found = wait_until(sweep, 60)
    assert found is not None
    return found


@pytest.fixture
def decided(
    broker: Broker, topic: Topic, connection: database.Connection, die: Callable[[Relay, str], None]
) -> Callable[[], str]:
    """Kill a relay between its decision and its commit; return the message's id."""

    def publish_and_die() -> str:
        ticket = TicketFactory(topic=topic)
        die(relay(connection, broker), "relay.after_decide")
        return str(ticket.message_id)

    return publish_and_die


def restore(server: RocketMQ) -> None:
    for name in ("transactionCheckMax", "transactionTimeOut"):
        server.set(name, FAST_CHECKS[name])


@pytest.fixture(autouse=True)
def restored(server: RocketMQ):
    yield
    restore(server)

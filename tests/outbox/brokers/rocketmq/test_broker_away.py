"""A broker of a cluster is killed and stays away: what it holds is settled when it is back, the rest at once, nothing twice."""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest

from outbox import conf, database
from outbox.brokers.base import HalfRef, HalfStatus, Outgoing, SendStatus
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.places import HalfPlace
from outbox.check_backs.ask import in_process
from outbox.check_backs.loop import Checker
from outbox.message import COMMIT, ROLLBACK, TopicSpec, TopicType
from outbox.models import Batch, CheckBack, DeadMessage, State, Topic
from outbox.relay.rounds import Relay
from project.servers.rocketmq import Cluster, RocketMQ
from tests.factories import TicketFactory, TopicFactory
from tests.outbox.brokers.rocketmq.commit_window import copies_in
from tests.rocketmq_node import PROXY, own_cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

# A relay may take seconds between half message and end on a busy machine; the checks begin later.
CHECKS = {"transactionTimeOut": 6000, "transactionCheckInterval": 1000, "transactionCheckMax": 1000}
QUEUES = 4
PATIENCE = 180  # seconds, of a busy machine

Open = Callable[[], RocketMQBroker]
Die = Callable[[Relay, str], None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with own_cluster(2, CHECKS, {**PROXY, "transactionHeartbeatPeriodSecond": 1}) as found:
        yield found


@pytest.fixture
def topic(cluster: Cluster, settings) -> Topic:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    cluster.make_topic(name, TopicType.TRANSACTION, QUEUES)
    options = {"ENDPOINTS": cluster.endpoints, "NAME_SERVERS": cluster.name_servers}
    settings.OUTBOX = {
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.rocketmq.RocketMQBroker", "OPTIONS": options}},
        "TOPICS": {name: {"TYPE": "transaction"}},
    }
    return TopicFactory(name=name, type="transaction")


@pytest.fixture
def open_new(cluster: Cluster, topic: Topic) -> Iterator[Open]:
    """Open brokers that know nothing yet, as a new process does."""
    opened: list[RocketMQBroker] = []

    def open_new() -> RocketMQBroker:
        options = {"ENDPOINTS": cluster.endpoints, "NAME_SERVERS": cluster.name_servers}
        opened.append(RocketMQBroker("default", options, [TopicSpec(topic.name, TopicType.TRANSACTION)]))
        return opened[-1]

    wait_until(lambda: is_usable(open_new()), PATIENCE)
    yield open_new
    for one in opened:
        one.close()


@contextmanager
def away(node: RocketMQ) -> Iterator[None]:
    node.kill_broker()
    yield
    node.start_broker()


def restart_name_servers(nodes: Sequence[RocketMQ]) -> None:
    for node in nodes:
        node.kill_namesrv()
    for node in nodes:
        node.start_namesrv()


def send(broker: RocketMQBroker, count: int) -> list[HalfRef]:
    """Send half messages of a topic to its brokers, in turn."""
    [topic] = broker.topics
    messages = [Outgoing(str(uuid.uuid4()), topic, b"{}", token="here:1:1:1") for _ in range(count)]
    outcomes = broker.send_halves(messages)
    assert [one.reason for one in outcomes if one.status is not SendStatus.ACCEPTED] == []
    return [HalfRef(topic, end.half_id, one.message_id, end.place) for one, end in zip(messages, outcomes, strict=True)]


def is_usable(broker: RocketMQBroker) -> bool:
    with suppress(AssertionError):
        return {broker_of(half) for half in send(broker, 2)} == {"broker-a", "broker-b"}
    return False


def broker_of(half: HalfRef) -> str:
    place = HalfPlace.read(half.place)
    assert place is not None
    return place.broker


def copies(node: RocketMQ, topic: Topic) -> Counter[str]:
    return copies_in(node, topic.name, QUEUES)


def relay(connection: database.Connection, broker: RocketMQBroker) -> Relay:
    return Relay(connection, broker, 1, settings=conf.RelaySettings(sweep_age=timedelta(0)))


def publish(topic: Topic, count: int = 10) -> set[str]:
    return {str(ticket.message_id) for ticket in TicketFactory.create_batch(count, topic=topic)}


class TestConsumers:
    def test_get_what_one_broker_has_while_the_other_has_nothing(self, cluster: Cluster, topic: Topic, open_new: Open):
        cluster.make_group("group")
        broker = open_new()
        found = []

        for _ in range(6):
            [half] = send(broker, 1)
            broker.end([half], COMMIT)
            hold, wait = timedelta(minutes=5), timedelta(seconds=20)
            found.append((broker_of(half), len(broker.receive("group", [topic.name], limit=10, invisible_for=hold, wait=wait))))

        assert {name for name, _ in found} == {"broker-a", "broker-b"}
        assert [count for _, count in found] == [1] * 6


class TestEnds:
    def test_go_to_the_broker_that_has_the_half_message(self, cluster: Cluster, topic: Topic, open_new: Open):
        halves = send(open_new(), 10)
        stored, undone = halves[:6], halves[6:]

        broker = open_new()
        ends = [*broker.end(stored, COMMIT), *broker.end(undone, ROLLBACK)]

        assert {one.status for one in ends} == {SendStatus.ACCEPTED}
        for node, name in zip(cluster.nodes, ("broker-a", "broker-b"), strict=True):
            assert copies(node, topic) == Counter(half.message_id for half in stored if broker_of(half) == name)
            assert copies(node, topic)

    def test_wait_for_a_broker_that_is_away(self, cluster: Cluster, topic: Topic, open_new: Open):
        old = open_new()
        halves = send(old, 6)
        lost = [half for half in halves if broker_of(half) == "broker-b"]

        with away(cluster.nodes[1]):
            restart_name_servers(cluster.named)  # so nobody names it
            for broker in (old, open_new()):
                assert {one.status for one in broker.end(lost, COMMIT)} == {SendStatus.UNAVAILABLE}
                assert set(broker.look_up_halves(lost)) == {HalfStatus.UNKNOWN}

        broker = open_new()
        wait_until(lambda: set(broker.look_up_halves(lost)) == {HalfStatus.HIDDEN}, PATIENCE)
        assert {one.status for one in broker.end(lost, COMMIT)} == {SendStatus.ACCEPTED}
        assert copies(cluster.nodes[1], topic) == Counter(half.message_id for half in lost)


class TestRelays:
    def test_settle_what_was_decided_when_the_broker_is_back(
        self, cluster: Cluster, topic: Topic, open_new: Open, connection: database.Connection, die: Die
    ):
        committed = publish(topic)
        wait_until(lambda: not relay(connection, open_new()).drain().unaccepted, PATIENCE)
        decided = publish(topic)
        die(relay(connection, open_new()), "relay.after_decide")

        with away(cluster.nodes[1]):
            new = relay(connection, open_new())
            meanwhile = publish(topic)
            wait_until(lambda: not new.drain().claimed and sent(meanwhile), PATIENCE)
            wait_until(lambda: new.sweep() and copies(cluster.nodes[0], topic).keys() & decided, PATIENCE)
            time.sleep(15)  # longer than a batch is left to its sweep: what is away is looked up again
            new.sweep()
            [waiting] = Batch.objects.exclude(state=State.SENT)

        new = relay(connection, open_new())
        wait_until(lambda: new.sweep() and not Batch.objects.exclude(state=State.SENT).exists(), PATIENCE)
        assert waiting.state == State.PREPARED
        assert not DeadMessage.objects.exists()
        found = sum((copies(node, topic) for node in cluster.nodes), Counter())
        assert found == Counter(committed | decided | meanwhile)

    def test_send_again_what_was_not_decided_and_roll_back_what_comes_back(
        self, cluster: Cluster, topic: Topic, open_new: Open, connection: database.Connection, die: Die
    ):
        checker = Checker("default", "default", in_process("default"))
        checker.turn()
        undecided = publish(topic)
        die(relay(connection, open_new()), "relay.after_half")
        Batch.objects.update(lease_until="2000-01-01T00:00Z")

        with away(cluster.nodes[1]):
            new = relay(connection, open_new())
            wait_until(lambda: not new.drain().claimed and sent(undecided), PATIENCE)
            asked = CheckBack.objects.count()
        wait_until(lambda: CheckBack.objects.count() > asked, PATIENCE)
        checker.close()

        assert copies(cluster.nodes[0], topic) == Counter(undecided)
        assert copies(cluster.nodes[1], topic) == Counter()


class TestNameServers:
    def test_that_know_nobody_yet_hide_no_broker(self, cluster: Cluster, topic: Topic, open_new: Open):
        restart_name_servers(cluster.named[:1])

        assert len(send(open_new(), 4)) == 4


def sent(messages: set[str]) -> bool:
    """Return whether all batches of messages are SENT."""
    return all(batch.state == State.SENT for batch in Batch.objects.all() if {str(one) for one in batch.message_ids} & messages)

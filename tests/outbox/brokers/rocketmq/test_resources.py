"""What `outbox_topics` finds and creates at a real RocketMQ."""

import uuid
from collections.abc import Callable, Iterator

import pytest

from outbox.brokers.base import Outgoing, ServerResource
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.errors import BrokerCannotTell, BrokerUnavailable
from outbox.message import TopicSpec, TopicType
from project.servers.rocketmq_admin import make_group
from tests.rocketmq_node import server
from tests.waiting import wait_until

Open = Callable[..., RocketMQBroker]


@pytest.fixture
def open_with() -> Iterator[Open]:
    """Open a broker with topics."""
    opened: list[RocketMQBroker] = []

    def open_with(*topics: TopicSpec, **options: object) -> RocketMQBroker:
        given = {"ENDPOINTS": server().endpoints, "NAME_SERVERS": [server().name_server], **options}
        opened.append(broker := RocketMQBroker("default", given, topics))
        return broker

    yield open_with
    for broker in opened:
        broker.close()


def new(kind: TopicType, **fields: object) -> TopicSpec:
    return TopicSpec(f"{kind}-{uuid.uuid4().hex[:8]}", kind, **fields)


def resources(broker: RocketMQBroker, *readers: str) -> dict[str, ServerResource]:
    return {one.name: one for one in broker.list_resources(sources=[], lanes=16, readers=readers)}


class TestTopics:
    def test_are_on_each_broker_that_the_name_servers_know(self, open_with: Open):
        topic = new(TopicType.DELAY, queues=2)
        broker = open_with(topic)

        resources(broker)[topic.name].create()

        found = resources(broker)[topic.name]
        assert found.place == server().broker
        assert found.wanted == {"message.type": "DELAY", "queues": "2"}
        assert (found.exists, found.differences, found.trouble) == (True, (), "")

    def test_of_another_type_or_with_fewer_queues_are_different(self, open_with: Open):
        topic = new(TopicType.FIFO, queues=8)
        server().make_topic(topic.name, TopicType.NORMAL)

        found = resources(open_with(topic))[topic.name]

        assert found.differences == ("message.type=NORMAL, not FIFO", "4 queues, not 8")

    def test_stay_as_they_are_if_somebody_creates_them_meanwhile(self, open_with: Open):
        topic = new(TopicType.NORMAL, queues=8)
        broker = open_with(topic)
        missing = resources(broker)[topic.name]
        server().make_topic(topic.name, TopicType.NORMAL)

        missing.create()

        assert resources(broker)[topic.name].differences == ("4 queues, not 8",)

    def test_carry_messages_at_once(self, open_with: Open):
        topic = new(TopicType.TRANSACTION, groups=frozenset({f"cart-{uuid.uuid4().hex[:8]}"}))
        broker = open_with(topic)
        for one in resources(broker).values():
            one.create()

        [result] = wait_until(lambda: _accepted(broker, topic.name))

        assert result.place


def _accepted(broker: RocketMQBroker, topic: str) -> list[object]:
    results = broker.send_halves([Outgoing(str(uuid.uuid4()), topic, b"{}")])
    return results if results[0].status == "accepted" else []


class TestGroups:
    def test_keep_order_for_topics_of_type_fifo_and_their_retries_are_never_used_up(self, open_with: Open):
        group = f"cart-{uuid.uuid4().hex[:8]}"
        broker = open_with(new(TopicType.FIFO, groups=frozenset({group})), new(TopicType.NORMAL, groups=frozenset({group})))

        for one in resources(broker).values():
            one.create()

        found = resources(broker)
        assert found[group].wanted == {"retryMaxTimes": "1000000", "consumeMessageOrderly": "false"}
        assert found[f"{group}_fifo"].wanted == {"retryMaxTimes": "1000000", "consumeMessageOrderly": "true"}
        assert [one.differences for one in found.values()] == [(), (), (), ()]

    def test_without_handlers_are_created_for_the_types_of_all_topics(self, open_with: Open):
        broker = open_with(new(TopicType.FIFO), new(TopicType.NORMAL))
        recorder = f"recorder-{uuid.uuid4().hex[:8]}"

        names = {one.name for one in resources(broker, recorder).values() if one.kind == "group"}

        assert names == {recorder, f"{recorder}_fifo"}

    def test_with_other_settings_are_different(self, open_with: Open):
        group = f"cart-{uuid.uuid4().hex[:8]}"
        make_group(server().broker_address, f"{group}_fifo", retries=16)

        found = resources(open_with(new(TopicType.FIFO, groups=frozenset({group}))))[f"{group}_fifo"]

        assert found.differences == ("retryMaxTimes=16, not 1000000 or more", "consumeMessageOrderly=false, not true")


class TestAServer:
    def test_without_an_address_of_its_ports_names_the_option(self, open_with: Open):
        with pytest.raises(BrokerCannotTell, match=r'Listing topics and groups needs OPTIONS\["NAME_SERVERS"\]'):
            resources(open_with(new(TopicType.NORMAL), NAME_SERVERS=[]))

    def test_is_found_by_the_address_of_its_broker_alone(self, open_with: Open):
        topic = new(TopicType.NORMAL)

        found = resources(open_with(topic, NAME_SERVERS=[], BROKER_ADDRESSES={"broker-a": server().broker}))

        assert found[topic.name].exists is False

    def test_that_is_away_is_named(self, open_with: Open):
        broker = open_with(new(TopicType.NORMAL), NAME_SERVERS=["127.0.0.1:1"])

        with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
            resources(broker)

"""What RocketMQ gave up, by its own ways: the topic it came from, its offset, and a broker that is away or denies it."""

from collections.abc import Callable

import pytest

from outbox.brokers.base import Broker
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.remoting import requests
from outbox.errors import BrokerUnavailable
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.outbox.brokers.rocketmq.port_stub import PortStub

NORMAL, FIFO = TopicType.NORMAL, TopicType.FIFO


class TestReceiveGivenUp:
    def test_names_the_servers_topic_of_the_group(self, acts: Acts, broker: RocketMQBroker, harness: RocketMQHarness):
        messages = acts.send_bodies(b"a", kind=FIFO, key="a")
        harness.give_up("cart", messages)

        [delivery] = broker.receive_dead_letters("cart", [messages[0].topic], limit=10)

        broker.ack([delivery])
        assert delivery.dead_letter_reason == "RocketMQ moved it to %DLQ%cart_fifo (retryMaxTimes)."

    def test_passes_over_what_was_acknowledged_behind_another(self, acts: Acts, broker: RocketMQBroker, harness: RocketMQHarness):
        harness.give_up("points", acts.send_bodies(*[b"%d" % n for n in range(40)]))  # more than the server's limit of a pull
        topics = [harness.topic(NORMAL)]
        first, *later = broker.receive_dead_letters("points", topics, limit=100)
        broker.ack(later)

        again = broker.receive_dead_letters("points", topics, limit=100)

        broker.ack([first])
        assert len(later) == 39
        assert [delivery.message_id for delivery in again] == [first.message_id]
        assert harness.open().receive_dead_letters("points", topics, limit=100) == []

    def test_leaves_what_is_of_another_topic(self, acts: Acts, broker: RocketMQBroker, harness: RocketMQHarness):
        messages = acts.send_bodies(b"a")
        harness.give_up("shipment", messages)

        elsewhere = broker.receive_dead_letters("shipment", [harness.topic(TopicType.TRANSACTION)], limit=10)

        again = broker.receive_dead_letters("shipment", [harness.topic(NORMAL)], limit=10)
        broker.ack(again)
        assert elsewhere == []
        assert [delivery.message_id for delivery in again] == [messages[0].message_id]

    def test_returns_nothing_without_the_brokers_own_port(self, harness: RocketMQHarness):
        broker = harness.open(NAME_SERVERS=[])

        assert broker.receive_dead_letters("group", broker.topics, limit=10) == []
        with pytest.raises(BrokerUnavailable, match="NAME_SERVERS"):
            broker.backlog("group")

    def test_returns_nothing_for_a_while_where_the_brokers_own_port_is_away(
        self, acts: Acts, harness: RocketMQHarness, caplog: pytest.LogCaptureFixture
    ):
        broker = harness.open(NAME_SERVERS=["127.0.0.1:1"])
        acts.send_bodies(b"a")

        dead_letters = [broker.receive_dead_letters("group", broker.topics, limit=10) for _ in range(2)]

        assert dead_letters == [[], []]
        assert caplog.text.count("The dead-letter queues of group 'group' cannot be read") == 1
        assert [delivery.body for delivery in acts.receive(broker=broker, count=1)] == [b"a"]
        with pytest.raises(BrokerUnavailable, match="does not answer at its remoting port"):
            broker.backlog("group")

    @pytest.mark.parametrize("code", [requests.QUERY_CONSUMER_OFFSET, requests.PULL_MESSAGE])
    def test_returns_nothing_where_the_user_may_not_read_it_and_names_the_right(
        self, open_here: Callable[..., Broker], port: PortStub, caplog: pytest.LogCaptureFixture, code: int
    ):
        port.say(code, requests.NO_PERMISSION, "no right")

        assert open_here().receive_dead_letters("cart", [NORMAL], limit=10) == []

        assert "grant ACCESS_KEY Get and Sub on Topic:%DLQ%cart and Group:cart (ACL 2.0)" in caplog.text

"""What RabbitMQ itself takes out of a group's queue: it is kept in the inlet, and received from there with the reason."""

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta

import amqp
import pytest

from outbox.brokers.base import Delivery, Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.rabbitmq.acts import received
from tests.outbox.brokers.rabbitmq.conftest import Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]
SetPolicy = Callable[..., None]


@pytest.fixture
def set_policy(node: RabbitMQ, topic: str) -> Iterator[SetPolicy]:
    """Set a policy for the queue of group "billing"."""

    def set_policy(**definition: int) -> None:
        named = {name.replace("_", "-"): value for name, value in definition.items()}
        node.control("set_policy", topic, f"^{topic}:billing$", json.dumps(named), "--apply-to", "queues")

    yield set_policy
    node.control("clear_policy", topic)


def receive_given_up(broker: RabbitMQBroker, topic: str, limit: int = 10) -> list[Delivery]:
    return broker.receive_given_up("billing", [topic], limit=limit)


class TestExpiredMessage:
    @pytest.mark.parametrize("kind", [TopicType.NORMAL, TopicType.FIFO])
    def test_is_received_with_the_reason_and_all_that_it_had(
        self, open_broker: Open, message: NewMessage, topic, set_policy, kind
    ):
        broker = open_broker(kind)
        sent = message(b"late", key="k", tag="placed", headers={"who": "Zoë"})
        set_policy(message_ttl=100)
        broker.send([sent])

        [found] = wait_until(lambda: receive_given_up(broker, topic))

        assert "longer than the topic's RETENTION" in found.given_up
        assert (found.message_id, found.body, found.key, found.tag) == (sent.message_id, b"late", "k", "placed")
        assert (found.headers, found.topic, found.group) == ({"who": "Zoë"}, topic, "billing")
        assert received(broker, topic) == []

    def test_of_another_producer_keeps_its_tag(self, broker, channel: amqp.Channel, topic, set_policy):
        set_policy(message_ttl=100)
        receive_given_up(broker, topic)  # so that the topic is there

        channel.basic_publish(amqp.Message(b"theirs"), topic, "placed")
        [found] = wait_until(lambda: receive_given_up(broker, topic))

        assert (found.body, found.tag) == (b"theirs", "placed")

    def test_of_a_topics_retention_is_kept(self, node: RabbitMQ, message: NewMessage, topic):
        spec = TopicSpec(topic, TopicType.NORMAL, retention=timedelta(seconds=1), groups=frozenset({"billing"}))
        broker = RabbitMQBroker("short", {"NODES": [node.address]}, [spec])
        broker.send([message(b"late")])

        [found] = wait_until(lambda: receive_given_up(broker, topic))

        assert found.body == b"late"
        broker.close()


class TestMessageThatWasDeliveredTooOften:
    def test_is_received_with_the_reason(self, broker, channel: amqp.Channel, message: NewMessage, topic, set_policy):
        broker.send([message(b"again and again")])
        set_policy(delivery_limit=2)

        def return_it() -> list[Delivery]:
            if (got := channel.basic_get(f"{topic}:billing")) is not None:
                channel.basic_reject(got.delivery_tag, requeue=True)
            return receive_given_up(broker, topic)

        [found] = wait_until(return_it)

        assert found.body == b"again and again"
        assert "too often" in found.given_up


class TestInlet:
    @pytest.fixture
    def filled(self, broker, message: NewMessage, set_policy) -> list[str]:
        """The ids of three messages that are given up."""
        messages = [message() for _ in range(3)]
        set_policy(message_ttl=100)
        broker.send(messages)
        wait_until(lambda: sum(broker.backlog("billing").given_up.values()) == 3)
        return [one.message_id for one in messages]

    def test_has_what_was_not_acknowledged_again(self, broker, filled, topic):
        first = receive_given_up(broker, topic)

        again = wait_until(lambda: found if len(found := receive_given_up(broker, topic)) == 3 else None)  # the server is late

        assert [one.message_id for one in again] == [one.message_id for one in first] == filled
        assert broker.ack(first) == [False] * 3
        assert broker.ack(again) == [True] * 3
        assert receive_given_up(broker, topic) == []

    def test_is_counted_and_keeps_what_the_group_has_noted(self, broker, filled, topic):
        other = uuid.uuid4().hex

        before = broker.backlog("billing").given_up, broker.may_deliver_again("billing", [filled[0], other])
        broker.ack(receive_given_up(broker, topic))

        assert before == ({topic: 3}, {filled[0], other})
        assert (broker.backlog("billing").given_up, broker.may_deliver_again("billing", filled)) == ({}, set())

    def test_that_was_deleted_is_declared_again_and_loses_nothing(
        self, broker, channel: amqp.Channel, message: NewMessage, topic, set_policy
    ):
        set_policy(message_ttl=2000)
        broker.send([message(b"a")])
        channel.queue_delete(f"{topic}:billing:given-up")

        [found] = wait_until(lambda: receive_given_up(broker, topic), 60)
        assert found.body == b"a"

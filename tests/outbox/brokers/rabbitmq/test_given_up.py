"""Messages that RabbitMQ itself moves to a group's dead-letter queue are received from there with the reason."""

import uuid
from collections.abc import Callable
from datetime import timedelta

import amqp
import pytest

from outbox.brokers.base import Delivery, Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.message import TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.rabbitmq.acts import received
from tests.outbox.brokers.rabbitmq.conftest import Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]

SHORT = timedelta(seconds=0.1)


def receive_dead_letters(broker: RabbitMQBroker, topic: str, limit: int = 10) -> list[Delivery]:
    return broker.receive_dead_letters("billing", [topic], limit=limit)


class TestExpiredMessage:
    @pytest.mark.parametrize("kind", [TopicType.NORMAL, TopicType.FIFO])
    def test_is_received_with_the_reason_and_all_that_it_had(self, open_broker: Open, message: NewMessage, topic, kind):
        broker = open_broker(kind, retention=SHORT)
        sent = message(b"late", key="k", tag="placed", headers={"who": "Zoë"})
        broker.send([sent])

        [found] = wait_until(lambda: receive_dead_letters(broker, topic))

        assert "longer than the topic's RETENTION" in found.dead_letter_reason
        assert (found.message_id, found.body, found.key, found.tag) == (sent.message_id, b"late", "k", "placed")
        assert (found.headers, found.topic, found.group) == ({"who": "Zoë"}, topic, "billing")
        assert received(broker, topic) == []

    def test_of_another_producer_keeps_its_tag(self, open_broker: Open, channel: amqp.Channel, topic):
        broker = open_broker(retention=SHORT)
        receive_dead_letters(broker, topic)  # so that the topic is there

        channel.basic_publish(amqp.Message(b"theirs"), topic, "placed")
        [found] = wait_until(lambda: receive_dead_letters(broker, topic))

        assert (found.body, found.tag) == (b"theirs", "placed")


class TestMessageThatWasDeliveredTooOften:
    def test_is_received_with_the_reason(self, broker, channel: amqp.Channel, message: NewMessage, topic, node: RabbitMQ):
        broker.send([message(b"again and again")])
        node.call("rabbit_policy:parse_set", "/", topic, f"^{topic}:billing$", '{"delivery-limit": 2}', "0", "queues")

        def return_it() -> list[Delivery]:
            if (got := channel.basic_get(f"{topic}:billing")) is not None:
                channel.basic_reject(got.delivery_tag, requeue=True)
            return receive_dead_letters(broker, topic)

        [found] = wait_until(return_it)

        assert found.body == b"again and again"
        assert "too often" in found.dead_letter_reason


class TestInlet:
    @pytest.fixture
    def broker(self, open_broker: Open) -> RabbitMQBroker:
        return open_broker(retention=SHORT)

    @pytest.fixture
    def filled(self, broker, message: NewMessage) -> list[str]:
        """The ids of three messages that are given up."""
        messages = [message() for _ in range(3)]
        broker.send(messages)
        wait_until(lambda: sum(broker.backlog("billing").dead_letters.values()) == 3)
        return [one.message_id for one in messages]

    def test_has_what_was_not_acknowledged_again(self, broker, filled, topic):
        first = receive_dead_letters(broker, topic)

        # The server is late.
        again = wait_until(lambda: found if len(found := receive_dead_letters(broker, topic)) == 3 else None)

        assert [one.message_id for one in again] == [one.message_id for one in first] == filled
        assert broker.ack(first) == [False] * 3
        assert broker.ack(again) == [True] * 3
        assert receive_dead_letters(broker, topic) == []

    def test_is_counted_and_keeps_what_the_group_has_noted(self, broker, filled, topic):
        other = uuid.uuid4().hex

        before = broker.backlog("billing").dead_letters, broker.may_deliver_again("billing", [filled[0], other])
        broker.ack(receive_dead_letters(broker, topic))

        assert before == ({topic: 3}, {filled[0], other})
        assert (broker.backlog("billing").dead_letters, broker.may_deliver_again("billing", filled)) == ({}, set())

    def test_that_was_deleted_is_declared_again_and_loses_nothing(
        self, open_broker: Open, channel: amqp.Channel, message: NewMessage, topic
    ):
        broker = open_broker(retention=timedelta(seconds=2))
        broker.send([message(b"a")])
        channel.queue_delete(f"{topic}:billing:given-up")

        [found] = wait_until(lambda: receive_dead_letters(broker, topic), 60)
        assert found.body == b"a"

"""Delayed messages whose destination, or whose way, is missing or full: they hold nobody else up."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import amqp
import pytest

from outbox.brokers.base import DelayedCount, Outgoing, SendStatus
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.brokers.rabbitmq.topology import DELAY_QUEUES, DUE, UNDELIVERABLE, delay_queue, delay_queues
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.rabbitmq.acts import receive_all, statuses
from tests.outbox.brokers.rabbitmq.conftest import HELD
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

SECOND = timedelta(seconds=1)


@pytest.fixture
def other(topic: str) -> str:
    return f"{topic}-other"


@pytest.fixture
def broker(node: RabbitMQ, channel: amqp.Channel, topic: str, other: str) -> Iterator[RabbitMQBroker]:
    """A broker with two topics of type delay, of which one has a group: "billing". Nothing is delayed yet."""
    broker = RabbitMQBroker("rabbit", options(node, topic), specs(topic, other))
    broker.send([Outgoing("first", topic, b"{}")])
    for queue in delay_queues():
        channel.queue_purge(queue)
    receive_all(broker, topic, 1)
    yield broker
    broker.close()


def options(node: RabbitMQ, topic: str) -> dict[str, Any]:
    return {"NODES": [node.address], "GROUPS": {topic: ["billing"]}}


def specs(*names: str) -> list[TopicSpec]:
    return [TopicSpec(name, TopicType.DELAY) for name in names]


def delayed(topic: str, count: int) -> list[Outgoing]:
    due = datetime.now(UTC) + SECOND
    return [Outgoing(f"{topic}-{number}", topic, b"{}", deliver_at=due) for number in range(count)]


class TestMessagesWithoutAGroup:
    def test_hold_up_no_others_and_are_counted(self, broker, topic, other):
        results = broker.send(delayed(other, 100))
        wait_until(lambda: broker.delayed() == DelayedCount(0, undeliverable=100))

        broker.send(delayed(topic, 5))
        found = receive_all(broker, topic, 5)

        assert set(statuses(results)) == {SendStatus.ACCEPTED}
        assert len(found) == 5

    def test_come_as_soon_as_there_is_a_group(self, broker, node: RabbitMQ, topic, other):
        broker.send(delayed(other, 700))
        wait_until(lambda: broker.delayed() == DelayedCount(0, undeliverable=700))
        consumer = RabbitMQBroker("rabbit", options(node, topic), specs(topic, other))
        began = time.monotonic()

        consumer.receive("billing", [other], limit=1, invisible_for=HELD, wait=timedelta())
        consumer.close()
        consumer = RabbitMQBroker("rabbit", options(node, topic), specs(topic, other))
        found = receive_all(consumer, other, 700)

        assert len(found) == len(set(found)) == 700
        assert time.monotonic() - began < 30
        assert broker.delayed() == DelayedCount(0, undeliverable=0)
        consumer.close()


class TestMessagesForAFullQueue:
    def test_come_though_it_is_full(self, node: RabbitMQ, topic):
        broker = RabbitMQBroker("rabbit", {**options(node, topic), "MAX_LENGTH": 3}, specs(topic))
        broker.send(delayed(topic, 1))
        wait_until(lambda: SendStatus.UNAVAILABLE in statuses(broker.send([Outgoing("filling", topic, b"{}")])))

        waiting = wait_until(lambda: broker.delayed().waiting == 0 and broker.backlog("billing")[topic])
        found = receive_all(broker, topic, 2)

        assert waiting > 3
        assert f"{topic}-0" in found
        broker.close()


class TestDeletedWay:
    @pytest.mark.parametrize("name", [delay_queue(0), delay_queue(DELAY_QUEUES - 1), UNDELIVERABLE])
    def test_is_declared_again_before_anything_is_delayed(self, broker, channel: amqp.Channel, topic, name):
        channel.queue_delete(name)

        results = broker.send(delayed(topic, 2))

        assert statuses(results) == [SendStatus.ACCEPTED] * 2
        assert len(receive_all(broker, topic, 2)) == 2

    @pytest.mark.parametrize("name", [delay_queue(0), delay_queue(DELAY_QUEUES - 1), DUE])
    def test_of_exchanges_is_declared_again(self, broker, channel: amqp.Channel, topic, name):
        channel.exchange_delete(name)

        results = broker.send(delayed(topic, 2))

        assert statuses(results) == [SendStatus.ACCEPTED] * 2
        assert len(receive_all(broker, topic, 2)) == 2

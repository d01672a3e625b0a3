"""A RabbitMQ for faults: each test may hurt it, and leaves it well."""

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import amqp
import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.rabbitmq_node import server

Open = Callable[..., RabbitMQBroker]

HELD = timedelta(minutes=10)


@pytest.fixture
def node() -> RabbitMQ:
    return server()


@pytest.fixture
def topic() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def open_broker(node: RabbitMQ, topic: str) -> Iterator[Open]:
    """Open brokers with one topic, of group "billing"."""
    opened = []

    def open_broker(
        kind: TopicType = TopicType.NORMAL, *, retention: timedelta = timedelta(days=7), **arguments: Any
    ) -> RabbitMQBroker:
        clock = {"clock": arguments.pop("clock")} if "clock" in arguments else {}
        options = {"NODES": [node.address], "GROUPS": {topic: ["billing"]}, "REQUEST_TIMEOUT": "PT5S", **arguments}
        broker = RabbitMQBroker("rabbit", options, [TopicSpec(topic, kind, retention=retention)], **clock)
        opened.append(broker)
        return broker

    yield open_broker
    for broker in opened:
        broker.close()


@pytest.fixture
def broker(open_broker: Open) -> RabbitMQBroker:
    return open_broker()


@pytest.fixture
def channel(node: RabbitMQ) -> Iterator[amqp.Channel]:
    """Speak with the server as somebody else."""
    with amqp.Connection(node.address) as connection, connection.channel() as channel:
        yield channel


@pytest.fixture
def message(topic: str) -> Callable[..., Outgoing]:
    def message(body: bytes = b"{}", **fields: Any) -> Outgoing:
        return Outgoing(message_id=uuid.uuid4().hex, topic=topic, body=body, **fields)

    return message

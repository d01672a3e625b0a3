"""A message of another program that a proxy of RocketMQ cannot convert, between good ones in a queue."""

import uuid
from collections.abc import Iterator
from datetime import timedelta

import pytest

from outbox.brokers.base import TopicSpec
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.remoting.requests import send
from outbox.errors import BrokerUnavailable
from outbox.message import TopicType
from project.servers.remoting import exchange
from tests.waiting import wait_until

COUNT = 100
YEAR_56000 = 1_700_000_000_000_000  # where milliseconds are meant, and another program writes microseconds


@pytest.fixture
def topic(server) -> str:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    server.make_topic(name, TopicType.NORMAL, queues=1)
    return name


@pytest.fixture
def broker(server, topic) -> Iterator[RocketMQBroker]:
    options = {"ENDPOINTS": server.endpoints, "NAME_SERVERS": [server.name_server]}
    broker = RocketMQBroker("default", options, [TopicSpec(topic, TopicType.NORMAL)])
    yield broker
    broker.close()


@pytest.mark.timeout(240)  # what lies behind such a message comes when it is visible again
def test_born_beyond_the_calendar_holds_up_no_other_one(broker, server, topic):
    for number in range(COUNT):
        born_at = YEAR_56000 if number % 50 == 10 else None
        exchange(server.broker_address, send(topic, 0, b"%d" % number, {}, group="theirs", born_at=born_at)).checked()
    bodies = set()

    def received() -> bool:
        try:
            deliveries = broker.receive("cart", [topic], limit=32, invisible_for=timedelta(seconds=10), wait=timedelta(seconds=1))
        except BrokerUnavailable:
            return False
        bodies.update(int(delivery.body) for delivery in deliveries)
        return all(broker.ack(deliveries)) and len(bodies) == COUNT - 2

    wait_until(received, seconds=150)

    assert bodies == {number for number in range(COUNT) if number % 50 != 10}

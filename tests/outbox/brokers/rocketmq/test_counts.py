"""Messages whose count of deliveries another program has written."""

import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from outbox.brokers.base import TopicSpec
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.remoting.requests import send
from outbox.message import TopicType
from project.servers.remoting import exchange
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def topic(server: Any) -> str:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    server.make_topic(name, TopicType.NORMAL, queues=1)
    return name


@pytest.fixture
def broker(server: Any, topic: str) -> Iterator[RocketMQBroker]:
    options = {"ENDPOINTS": server.endpoints, "NAME_SERVERS": [server.name_server]}
    broker = RocketMQBroker("default", options, [TopicSpec(topic, TopicType.NORMAL)])
    yield broker
    broker.close()


def test_are_counts_that_can_be_stored_and_added_to(broker: RocketMQBroker, server: Any, topic: str):
    for count in (2**31 - 2, 2**31 - 1, -5):
        request = send(topic, 0, b"%d" % count, {}, group="theirs")
        exchange(server.broker_address, replace(request, fields={**request.fields, "j": count})).checked()
    counts: dict[bytes, int] = {}

    def received() -> bool:
        wait = timedelta(seconds=1)
        deliveries = broker.receive("cart", [topic], limit=32, invisible_for=timedelta(minutes=5), wait=wait)
        deliveries += broker.receive_dead_letters("cart", [topic], limit=32)  # the server gives up what has a large count
        counts.update({delivery.body: delivery.delivery_count for delivery in deliveries})
        return len(counts) == 3

    wait_until(received, seconds=60)

    assert all(1 <= count <= 1_000_000 for count in counts.values()), counts

"""A relay whose link to RocketMQ passes 1 MB a second."""

import uuid
from collections.abc import Iterator

import pytest

from outbox import database
from outbox.brokers.base import TopicSpec
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.message import TopicType
from outbox.relay.rounds import Relay
from project.servers.remoting import read_all
from tests.factories import MessageRowFactory, TicketFactory, TopicFactory
from tests.slow_link import SlowLink, drains
from tests.waiting import wait_until

pytestmark = [pytest.mark.rocketmq, pytest.mark.django_db, pytest.mark.timeout(150)]

COUNT, SIZE = 40, 250_000  # together more than the link passes within a time-out


@pytest.fixture(params=[TopicType.NORMAL, TopicType.FIFO, TopicType.TRANSACTION])
def kind(request: pytest.FixtureRequest) -> TopicType:
    return request.param


@pytest.fixture
def link(server, kind) -> Iterator[SlowLink]:
    """Return a link to the proxy for messages of fifo topics, to the broker's own port for others."""
    with SlowLink(1_000_000, server.endpoints if kind is TopicType.FIFO else server.broker) as link:
        yield link


@pytest.fixture
def broker(server, link, kind, monkeypatch) -> Iterator[RocketMQBroker]:
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    server.make_topic(topic, kind)
    at = {address: address.replace(link.target, link.address) for address in (server.endpoints, server.broker)}
    options = {"NAME_SERVERS": [server.name_server], "BROKER_ADDRESSES": {"broker-a": at[server.broker]}}
    broker = RocketMQBroker("default", {"ENDPOINTS": at[server.endpoints], **options}, [TopicSpec(topic, kind)])
    stub, proxy = broker._client.stub, broker._client.access_point
    monkeypatch.setattr(broker._client, "stub", lambda endpoint: stub(proxy))  # a proxy leads its clients to its own port
    yield broker
    broker.close()


class TestRound:
    def test_gets_through_and_is_not_sent_again_and_again(self, link, broker, server, kind):
        [topic] = broker.topics
        row = TopicFactory(name=topic, type=kind)
        for number in range(COUNT):
            TicketFactory(topic=row, message=MessageRowFactory(topic=row, key=str(number), body=bytes(SIZE)))

        wait_until(lambda: drains(Relay(database.raw("default"), broker, 1)), seconds=60)

        assert len(list(read_all(server.broker_address, topic, 4))) == COUNT
        assert COUNT * SIZE < link.passed < 1.5 * COUNT * SIZE

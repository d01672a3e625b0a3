"""A relay whose link to Kafka passes 1 MB a second."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox import database
from outbox.relay.rounds import Relay
from project.servers.kafka import Kafka
from tests.factories import MessageRowFactory, TicketFactory, TopicFactory
from tests.kafka_node import JARS
from tests.outbox.brokers.kafka.cluster import create_topic, open_broker, read
from tests.slow_link import SlowLink, drains
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.django_db, pytest.mark.timeout(150)]

COUNT, SIZE = 40, 250_000  # together more than the link passes within a time-out


@pytest.fixture
def link() -> Iterator[SlowLink]:
    """Return a link to a node that names it to its clients."""
    home = Path(tempfile.mkdtemp(prefix="outbox-kafka-"))
    link = SlowLink(1_000_000)
    with link, Kafka(home, jars=JARS, settings={"advertised.listeners": f"PLAINTEXT://{link.address}"}) as node:
        link.target = node.address
        yield link
    shutil.rmtree(home, ignore_errors=True)


class TestRound:
    def test_gets_through_and_is_not_sent_again_and_again(self, link):
        topic = create_topic(at=link.address)
        row = TopicFactory(name=topic)
        relay = Relay(database.raw("default"), open_broker(topic, SERVERS=[link.address]), 1)
        relay.step()
        for _ in range(COUNT):
            TicketFactory(topic=row, message=MessageRowFactory(topic=row, body=bytes(SIZE)))
        passed = link.passed

        wait_until(lambda: drains(relay), seconds=60)

        assert len(read(topic, at=link.address)) == COUNT
        assert link.passed - passed < 1.5 * COUNT * SIZE

"""A relay whose link to RabbitMQ passes 1 MB a second."""

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from outbox import conf, database
from outbox.models import Batch, State
from outbox.relay.rounds import Relay
from tests.factories import MessageRowFactory, TicketFactory, TopicFactory
from tests.slow_link import SlowLink

pytestmark = [pytest.mark.rabbitmq, pytest.mark.django_db, pytest.mark.timeout(150)]

COUNT, SIZE = 40, 250_000
LEASE = timedelta(seconds=10)


@pytest.fixture
def link(node) -> Iterator[SlowLink]:
    with SlowLink(1_000_000, node.address.rpartition("@")[2].split("/")[0]) as link:
        yield link


class TestRound:
    def test_ends_within_the_lease_and_sends_nothing_twice(self, link, open_broker, topic, node, monkeypatch):
        row = TopicFactory(name=topic, broker="rabbit")
        broker = open_broker(NODES=[node.address.replace(link.target, link.address)])
        relay = Relay(database.raw("default"), broker, 1, settings=conf.RelaySettings(lease=LEASE))
        send, seconds = broker.send, []

        def note(messages):
            began = time.monotonic()
            results = send(messages)
            seconds.append(time.monotonic() - began)
            return results

        monkeypatch.setattr(broker, "send", note)
        for _ in range(COUNT):
            TicketFactory(topic=row, message=MessageRowFactory(topic=row, body=bytes(SIZE)))

        relay.drain()

        assert set(Batch.objects.values_list("state", flat=True)) == {State.SENT}
        assert link.passed < 1.1 * COUNT * SIZE
        assert max(seconds) < LEASE.total_seconds() / 2

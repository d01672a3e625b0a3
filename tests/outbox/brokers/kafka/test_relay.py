"""A relay on a real Kafka that dies at each point of a round: one copy of each message, as a reader of committed ones counts."""

import os
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import Producer
from django.db.models import F

from outbox import database
from outbox.errors import BrokerUnavailable
from outbox.failpoints import FailpointReached
from outbox.message import TopicType
from outbox.models import Batch, State
from outbox.relay.rounds import Relay
from tests.factories import MessageRowFactory, TicketFactory, TopicFactory
from tests.kafka_node import server
from tests.outbox.brokers.kafka.cluster import create_topic, open_broker, read
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.django_db, pytest.mark.timeout(120)]

LANE, OTHER = 1, 2
PLACES = [
    "relay.after_claim",
    "relay.before_transaction",
    "relay.after_transaction",
    "relay.after_mark",
]


def open_relay(topic: str, lane: int) -> Relay:
    return Relay(database.raw("default"), open_broker(topic, kind=TopicType.FIFO), lane)


def die(relay: Relay, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("OUTBOX_FAILPOINTS", f"{place}=raise")
    with pytest.raises(FailpointReached):
        relay.step()
    monkeypatch.delenv("OUTBOX_FAILPOINTS")
    Batch.objects.update(lease_until=F("lease_until") - timedelta(hours=1))


class TestDeath:
    @pytest.mark.parametrize("lane", [LANE, OTHER], ids=["same-lane", "other-lane"])
    def test_at_each_point_leaves_one_copy_in_order(self, monkeypatch, lane):
        topic = create_topic(partitions=3)
        row = TopicFactory(name=topic, type="fifo", ordered=True)
        tickets = []
        for place in PLACES:
            relay = open_relay(topic, LANE)
            relay.step()
            tickets += [TicketFactory(topic=row, order_key=number) for number in (1, 2)]
            die(relay, monkeypatch, place)

        open_relay(topic, lane).drain()

        records = read(topic)
        copies = Counter(dict(record.headers())["ce_id"].decode() for record in records)
        assert copies == {str(ticket.message_id): 1 for ticket in tickets}
        assert set(Batch.objects.values_list("state", flat=True)) == {State.SENT}

    def test_of_one_that_resolves_leaves_one_copy(self, monkeypatch):
        topic = create_topic(partitions=3)
        row = TopicFactory(name=topic, type="fifo", ordered=True)
        relay = open_relay(topic, LANE)
        relay.step()
        tickets = [TicketFactory(topic=row, order_key=number) for number in (1, 2)]
        die(relay, monkeypatch, "relay.after_transaction")
        for place in ("relay.before_fence", "relay.after_fence"):
            die(open_relay(topic, OTHER), monkeypatch, place)

        open_relay(topic, OTHER).drain()

        assert len(read(topic)) == len(tickets)


class TestRefused:
    @pytest.mark.parametrize("client", [{}, {"compression.type": "gzip"}], ids=["size-known", "size-unknown"])
    def test_message_holds_only_its_own_key(self, client):
        topic = create_topic(partitions=3, config={"max.message.bytes": "20000"})
        row = TopicFactory(name=topic, type="fifo", ordered=True)
        bodies = [os.urandom(25_000) if number == 45 else b"{}" for number in range(100)]
        messages = [MessageRowFactory(topic=row, key=f"k{number % 10}", body=body) for number, body in enumerate(bodies)]
        tickets = [TicketFactory(topic=row, message=one, order_key=n % 10) for n, one in enumerate(messages)]

        Relay(database.raw("default"), open_broker(topic, kind=TopicType.FIFO, CLIENT=client), LANE).drain()

        ids = [str(ticket.message_id) for ticket in tickets]
        held = ids[45::10]
        assert sorted(dict(record.headers())["ce_id"].decode() for record in read(topic)) == sorted(set(ids) - set(held))
        waiting = Batch.objects.exclude(state=State.SENT).order_by("first_seq")
        assert [batch.state for batch in waiting] == [State.DEAD, *[State.RELEASED] * 5]


class TestLargeMessages:
    def test_are_not_all_in_memory(self):
        topic = create_topic()
        row = TopicFactory(name=topic)
        relay = Relay(database.raw("default"), open_broker(topic), LANE)
        relay.step()
        for _ in range(200):
            TicketFactory(topic=row, message=MessageRowFactory(topic=row, body=bytes(1_000_000)))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        before = peak_bytes()

        relay.drain()

        peak = peak_bytes()
        assert len(read(topic)) == 200
        assert peak - before < 60_000_000


def peak_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


class TestWrongClock:
    def test_of_a_relay_makes_no_message_dead(self, monkeypatch):
        ahead = 0

        class Ahead(Producer):
            def produce(self, *args, **options):
                super().produce(*args, timestamp=int((time.time() + ahead) * 1000), **options)

        monkeypatch.setattr("outbox.brokers.kafka.sender.Producer", Ahead)
        topic = create_topic()
        row = TopicFactory(name=topic)
        TicketFactory(topic=row)
        relay = Relay(database.raw("default"), open_broker(topic), LANE)
        relay.step()
        late = TicketFactory(topic=row)
        ahead = 2 * 3600

        relay.drain()
        waiting = Batch.objects.get(message_ids=[late.message_id])
        ahead = 0
        wait_until(lambda: relay.drain().sent)

        assert (waiting.state, waiting.failures) == (State.RELEASED, 0)
        assert "Correct the clock of this relay" in waiting.last_error
        assert len(read(topic)) == 2


class TestOutage:
    def test_counts_no_failure_and_leaves_one_copy(self):
        topic = create_topic(partitions=3)
        row = TopicFactory(name=topic, type="fifo", ordered=True)
        relay = open_relay(topic, LANE)
        relay.step()
        tickets = [TicketFactory(topic=row, order_key=number) for number in (1, 2)]
        server().kill()
        with suppress(BrokerUnavailable):
            relay.step()
        with suppress(BrokerUnavailable):
            open_relay(topic, LANE).step()
        server().start()

        wait_until(lambda: _drains(topic), seconds=60)

        assert len(read(topic)) == len(tickets)
        assert set(Batch.objects.values_list("failures", flat=True)) == {0}


def _drains(topic: str) -> bool:
    """Return whether all is sent, by a relay that is started now."""
    Batch.objects.update(due_at=F("due_at") - timedelta(minutes=5))
    with suppress(BrokerUnavailable):
        open_relay(topic, LANE).drain()
    return set(Batch.objects.values_list("state", flat=True)) == {State.SENT}

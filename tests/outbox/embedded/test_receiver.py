"""Offsets and deliveries: messages that were read are held, and consumers do not block each other."""

import threading
from datetime import timedelta

import pytest

from outbox.brokers.base import Broker, Delivery
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker, receiver
from outbox.message import TopicType
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import EmbeddedHarness
from tests.waiting import run_at_once, wait_until_it_blocks

FIFO = TopicType.FIFO
HOLD_ONE = "SELECT FROM outbox_embedded_offset WHERE consumer_group = 'group' AND queue = %s FOR UPDATE"


class TestReadOn:
    def test_passes_over_a_queue_that_another_reads(self, acts: Acts, connection: Connection):
        acts.receive()
        acts.send(*[acts.message(key=f"key {n}") for n in range(40)])
        in_queue_0 = connection.execute("SELECT count(*) FROM outbox_embedded_message WHERE queue = 0").fetchone()
        assert in_queue_0 is not None

        with connection.transaction():
            connection.execute(HOLD_ONE, [0])
            meanwhile = acts.receive()
        rest = acts.receive()

        assert 0 < in_queue_0[0] < 40
        assert len(meanwhile) == 40 - in_queue_0[0]
        assert len(rest) == in_queue_0[0]

    def test_reads_on_where_another_stopped_meanwhile(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        acts.send_bodies(*[b"%d" % n for n in range(10)], key="one queue")
        acts.receive(limit=1)
        waiting = harness.open()
        found: list[bytes] = []
        held = "LOCK TABLE outbox_embedded_offset IN ACCESS EXCLUSIVE MODE"
        late = threading.Thread(target=lambda: found.extend(d.body for d in acts.receive(broker=waiting, limit=4)))

        with connection.transaction():
            connection.execute(held)
            late.start()
            wait_until_it_blocks(connection)
            connection.execute("UPDATE outbox_embedded_offset SET pos = 5 WHERE pos = 1")
        late.join(10)

        assert found == [b"5", b"6", b"7", b"8"]

    def test_does_not_stop_at_a_position_that_stayed_empty(self, acts: Acts):
        message = acts.message(key="one queue")
        acts.send(message)
        acts.send(message)
        acts.receive()

        assert acts.receive(wait=timedelta(seconds=0.1)) == []
        acts.send_bodies(b"next", key="one queue")
        assert acts.bodies() == [b"next"]

    def test_holds_what_it_moves_over(self, acts: Acts, connection: Connection):
        acts.send(*[acts.message(key=f"key {n}") for n in range(30)])
        acts.receive(limit=13)

        held = connection.execute("SELECT count(*) FROM outbox_embedded_delivery").fetchone()
        moved = connection.execute("SELECT sum(pos) FROM outbox_embedded_offset").fetchone()

        assert held == moved == (13,)


class TestFifo:
    def test_reads_ahead_of_a_stuck_key_for_others(self, acts: Acts, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(receiver, "MAX_WAITING", 30)
        stuck = acts.message(FIFO, key="stuck", body=b"head")
        acts.send(stuck, *[acts.message(FIFO, key="stuck") for _ in range(20)])
        acts.send(acts.message(FIFO, key="stuck", body=b"last"))
        acts.receive(FIFO, limit=1)

        acts.send(*[acts.message(FIFO, key=f"key {n}") for n in range(8)])

        assert len(acts.receive(FIFO)) == 8

    def test_reads_no_further_than_said(self, acts: Acts, connection: Connection, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(receiver, "MAX_WAITING", 30)
        acts.send(*[acts.message(FIFO, key="stuck") for _ in range(100)])

        for _ in range(10):
            acts.receive(FIFO)

        assert connection.execute("SELECT count(*) FROM outbox_embedded_delivery").fetchone() == (30,)

    def test_hands_out_one_of_a_key_when_many_ask_at_once(self, acts: Acts, harness: EmbeddedHarness):
        acts.send(*[acts.message(FIFO, key=f"key {n % 3}", body=b"%d" % n) for n in range(60)])
        order: dict[str, list[int]] = {f"key {n}": [] for n in range(3)}
        busy: set[str] = set()
        broken: list[str] = []

        def work(mine: Broker) -> None:
            while found := acts.receive(FIFO, broker=mine, limit=2, wait=timedelta(seconds=0.3)):
                for delivery in found:
                    if delivery.key in busy:
                        broken.append(delivery.key)
                    busy.add(delivery.key)
                for delivery in found:
                    order[delivery.key].append(int(delivery.body))
                    busy.discard(delivery.key)
                    mine.ack([delivery])

        run_at_once(work, *[harness.open() for _ in range(4)])

        assert broken == []
        assert order == {f"key {n}": list(range(n, 60, 3)) for n in range(3)}


class TestShares:
    @pytest.mark.parametrize(("limit", "receives"), [(32, 4), (6, 30), (1, 120)])
    def test_redeliveries_leave_a_quarter_to_what_nobody_has_read(
        self, acts: Acts, broker: EmbeddedBroker, limit: int, receives: int
    ):
        acts.send(*[acts.message() for _ in range(300)])
        broker.release(acts.receive(limit=300))
        acts.end(*acts.send_halves(*[acts.message(TopicType.TRANSACTION) for _ in range(30)]))

        taken = [take_of_both(acts, limit) for _ in range(receives)]

        new = [delivery for deliveries in taken for delivery in deliveries if delivery.delivery_count == 1]
        assert len(new) == 30
        assert sum(map(len, taken)) == receives * limit

    def test_new_messages_of_an_ordered_topic_come_in_their_turn(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness
    ):
        acts.send(*[acts.message() for _ in range(100)])
        broker.release(acts.receive(limit=100))
        acts.send(*[acts.message(FIFO, key=f"key {n}") for n in range(10)])
        new = 0

        for _ in range(12):  # a hundred redeliveries and a few more, of 16 at a time
            harness.pass_time(timedelta(milliseconds=10))
            found = take_of_both(acts, 16, FIFO)
            new += sum(delivery.topic == harness.topic(FIFO) for delivery in found)
            broker.release(found)

        assert new >= 10

    def test_all_is_for_those_that_are_there(self, acts: Acts, broker: EmbeddedBroker):
        acts.send(*[acts.message() for _ in range(20)])
        broker.release(acts.receive(limit=16))

        assert len(acts.receive(limit=20)) == 20


def take_of_both(acts: Acts, limit: int, other: TopicType = TopicType.TRANSACTION) -> list[Delivery]:
    topics = [acts.harness.topic(TopicType.NORMAL), acts.harness.topic(other)]
    return acts.broker.receive("group", topics, limit=limit, invisible_for=INVISIBLE, wait=timedelta(0))


class TestTakeDue:
    def test_gives_a_message_to_one_of_two_that_ask_at_once(self, acts: Acts, harness: EmbeddedHarness):
        acts.send(*[acts.message() for _ in range(100)])
        acts.receive(hold=INVISIBLE)
        harness.pass_time(INVISIBLE)
        found: list[str] = []

        def take(mine: Broker) -> None:
            while deliveries := acts.receive(broker=mine, limit=5):
                found.extend(delivery.message_id for delivery in deliveries)

        run_at_once(take, *[harness.open() for _ in range(3)])

        assert len(found) == len(set(found)) == 100

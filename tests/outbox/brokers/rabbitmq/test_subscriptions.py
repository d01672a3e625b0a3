"""What the server pushes to a process, what becomes of it there, and what is left to other processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import amqp
import pytest
from amqp import spec

from outbox.brokers.base import Delivery, Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker, receiver
from outbox.brokers.rabbitmq.envelope import to_delivery
from outbox.message import TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.rabbitmq.acts import received
from tests.outbox.brokers.rabbitmq.conftest import HELD, Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]

FIFO = TopicType.FIFO
OF_CONSUMERS = (spec.Basic.Qos, spec.Basic.Consume, spec.Basic.Cancel, spec.Basic.Ack, spec.Basic.Reject, spec.Basic.Nack)


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have messages given back after a second that nobody takes."""
    monkeypatch.setattr(receiver, "UNCLAIMED_SECONDS", 1.0)


class TestMessage:
    def test_is_handed_out_without_a_read_that_waits_for_nothing(self, broker, message: NewMessage, topic, monkeypatch):
        waits = []
        read = amqp.Connection.blocking_read

        def blocking_read(connection, timeout=None):
            try:
                return read(connection, timeout)
            except TimeoutError:
                waits.append(timeout)
                raise

        monkeypatch.setattr(amqp.Connection, "blocking_read", blocking_read)
        broker.send([message()])
        broker.ack(receive(broker, topic))

        assert waits == []

    def test_costs_an_acknowledgement_and_no_more(self, broker, message: NewMessage, topic):
        receive(broker, topic, seconds=0)

        broker.send([message()])
        with methods_sent() as methods:
            broker.ack(receive(broker, topic))

        assert methods == [spec.Basic.Ack]

    def test_comes_over_a_new_connection_where_the_old_one_was_closed(self, broker, node: RabbitMQ, message: NewMessage, topic):
        receive(broker, topic, seconds=0)
        node.control("close_all_connections", "a test")
        wait_until(lambda: broker.send([message(b"a")])[0].reason == "")

        [found] = wait_until(lambda: received(broker, topic))

        assert (found.body, found.delivery_count) == (b"a", 1)

    def test_of_a_queue_that_was_deleted_and_declared_again_comes(
        self, broker, channel: amqp.Channel, message: NewMessage, topic
    ):
        receive(broker, topic, seconds=0)
        channel.queue_delete(f"{topic}:billing")
        receive(broker, topic, seconds=0.5)

        broker.send([message(b"a")])

        assert bodies(wait_until(lambda: received(broker, topic))) == [b"a"]


class TestHand:
    def test_is_all_that_is_pushed(self, broker, message: NewMessage, topic):
        broker.send([message() for _ in range(30)])

        found = receive(broker, topic, limit=10)

        assert len(found) == 10
        wait_until(lambda: broker.backlog("billing").waiting == {topic: 20})

    def test_may_be_smaller_than_what_was_pushed_and_leaves_the_rest_for_the_next(self, broker, message: NewMessage, topic):
        receive(broker, topic, limit=100, seconds=0)
        broker.send([message(b"%d" % n) for n in range(6)])

        found = []
        while len(found) < 6:
            hand = receive(broker, topic, limit=2)
            broker.ack(hand)
            found += hand

        assert bodies(found) == [b"%d" % n for n in range(6)]
        assert {one.delivery_count for one in found} == {1}

    def test_may_grow(self, broker, message: NewMessage, topic):
        receive(broker, topic, limit=1, seconds=0)
        broker.send([message() for _ in range(40)])

        sizes = []
        while sum(sizes) < 40:
            hand = receive(broker, topic, limit=40)
            broker.ack(hand)
            sizes.append(len(hand))

        assert max(sizes) > 30


class TestReleasedMessage:
    def test_comes_again_to_its_process(self, broker, message: NewMessage, topic):
        broker.send([message(b"1"), message(b"2")])
        first, second = receive(broker, topic, limit=2)

        broker.release([first])
        [again] = receive(broker, topic)

        assert (again.body, again.delivery_count) == (b"1", 2)
        assert again.receipt != first.receipt
        assert (broker.ack([first]), broker.ack([again, second])) == ([False], [True, True])

    @pytest.mark.usefixtures("_soon")
    def test_comes_to_another_process_where_its_own_receives_no_more(self, open_broker: Open, message: NewMessage, topic):
        busy, free = open_broker(), open_broker()
        busy.send([message(b"1")])

        busy.release(receive(busy, topic))
        [again] = receive(free, topic, seconds=10)

        assert (again.body, again.delivery_count) == (b"1", 2)

    def test_is_not_given_up_however_often_it_is_released(self, broker, message: NewMessage, topic):
        broker.send([message(b"patient")])

        for _ in range(150):
            broker.release(wait_until(lambda: receive(broker, topic)))

        assert bodies(receive(broker, topic)) == [b"patient"]
        assert broker.backlog("billing").dead_letters == {}


class TestOrderedMessages:
    @pytest.fixture
    def broker(self, open_broker: Open, message: NewMessage, topic: str) -> RabbitMQBroker:
        """A broker to which three messages of key "a" and then one of key "b" have been pushed."""
        broker = open_broker(FIFO)
        receive(broker, topic, seconds=0)
        broker.send([message(b"a1", key="a"), message(b"a2", key="a"), message(b"a3", key="a"), message(b"b1", key="b")])
        wait_until(lambda: broker.backlog("billing").waiting == {topic: 0})
        return broker

    def test_wait_for_earlier_ones_of_their_key_from_another_hand(self, broker, topic):
        head = receive(broker, topic, limit=1)
        others = receive(broker, topic)
        broker.ack(head)

        assert (bodies(head), bodies(others)) == ([b"a1"], [b"b1"])
        assert bodies(receive(broker, topic)) == [b"a2", b"a3"]

    def test_begin_again_at_the_first_that_is_not_acknowledged_where_a_process_was_lost(self, broker, open_broker: Open, topic):
        hand = receive(broker, topic)
        broker.ack(hand[:1])
        broker.close()

        again = receive(open_broker(FIFO), topic)

        assert [(one.body, one.delivery_count) for one in again] == [(b"a2", 2), (b"a3", 2), (b"b1", 2)]

    def test_begin_again_at_the_first_where_a_process_with_a_smaller_hand_was_lost_meanwhile(
        self, open_broker: Open, message: NewMessage, topic
    ):
        """The server puts what it gets back behind what was already given back."""
        lost, small, last = open_broker(FIFO), open_broker(FIFO), open_broker(FIFO)
        lost.send([message(b"%d" % number, key="k") for number in range(6)])
        receive(lost, topic)
        lost.close()
        before = receive(small, topic, limit=2)
        small.close()

        assert bodies(before) == [b"0", b"1"]
        assert bodies(receive(last, topic)) == [b"%d" % number for number in range(6)]

    def test_begin_again_in_their_order_where_a_process_that_waits_gets_them(self, open_broker: Open, message: NewMessage, topic):
        now = [0.0]
        busy, free = open_broker(FIFO, clock=lambda: now[0]), open_broker(FIFO)
        receive(busy, topic, limit=1, seconds=0)
        receive(free, topic, seconds=0)
        busy.send([message(b"%d" % n, key="a") for n in range(20)])
        receive(busy, topic, limit=1)

        now[0] += HELD.total_seconds()  # its delivery has expired
        found = []
        while len(found) < 20:
            hand = receive(free, topic, seconds=10)
            free.ack(hand)  # before any of them expires, too
            found += hand

        assert bodies(found) == [b"%d" % n for n in range(20)]


@pytest.mark.usefixtures("_soon")
class TestBusyProcess:
    @pytest.mark.parametrize("kind", [TopicType.NORMAL, FIFO])
    def test_leaves_to_others_what_it_does_not_take(self, open_broker: Open, message: NewMessage, topic, kind):
        busy, free = open_broker(kind), open_broker(kind)
        busy.send([message(b"1", key="a")])
        [handled] = receive(busy, topic)
        busy.send([message(b"2", key="b")])  # it is pushed to the busy one
        wait_until(lambda: busy.backlog("billing").waiting == {topic: 0})

        found = []
        while len(found) < 2:
            found += receive(free, topic, seconds=10)

        assert [(one.body, one.delivery_count) for one in found] == [(b"1", 2), (b"2", 2)]
        assert (busy.ack([handled]), free.ack(found)) == ([False], [True, True])

    def test_keeps_what_it_handles_where_nothing_more_was_pushed(self, open_broker: Open, message: NewMessage, topic):
        busy, free = open_broker(), open_broker()
        busy.send([message()])
        handled = receive(busy, topic)

        nothing = receive(free, topic, seconds=3)

        assert (nothing, busy.ack(handled)) == ([], [True])

    def test_holds_no_more_than_its_next_hand_afterwards(self, open_broker: Open, message: NewMessage, topic):
        busy = open_broker()
        receive(busy, topic, limit=20, seconds=0)
        busy.send([message() for _ in range(20)])
        wait_until(lambda: busy.backlog("billing").waiting == {topic: 0})
        wait_until(lambda: busy.backlog("billing").waiting == {topic: 20})

        [first] = receive(busy, topic, limit=1)

        assert first.delivery_count == 2
        wait_until(lambda: busy.backlog("billing").waiting == {topic: 19})


class TestDeliveryThatIsLostOnItsWay:
    """As it is where the leader of a queue dies: the server has sent it, and no client has got it."""

    def test_comes_again_with_another_channel(self, broker, message: NewMessage, topic, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(receiver, "CHANNEL_SECONDS", 0.5)
        lost = [True]
        note = receiver.RabbitMQReceiver._on_message
        monkeypatch.setattr(receiver.RabbitMQReceiver, "_on_message", lambda *arguments: lost[0] or note(*arguments))
        broker.send([message(b"a")])
        nothing = receive(broker, topic, seconds=1)
        lost[0] = False

        [found] = wait_until(lambda: receive(broker, topic, seconds=1))

        assert nothing == []
        assert (found.body, broker.ack([found])) == (b"a", [True])


class TestDeliveryCount:
    @pytest.mark.parametrize(
        ("headers", "is_redelivered", "count"),
        [
            ({}, False, 1),
            ({"x-delivery-count": 0, "x-acquired-count": 0}, False, 1),
            ({}, True, 2),
            ({"x-delivery-count": 0}, True, 2),
            ({"x-delivery-count": 3}, True, 4),
            ({"x-delivery-count": 0, "x-acquired-count": 1}, False, 2),
            ({"x-acquired-count": 2**62}, False, 1_000_001),
            ({"x-delivery-count": "often", "x-acquired-count": -1}, False, 1),
        ],
        ids=str,
    )
    def test_is_one_only_where_the_server_has_certainly_sent_it_to_nobody(self, headers: dict[str, Any], is_redelivered, count):
        message = amqp.Message(b"", application_headers=headers)
        message.delivery_info = {"redelivered": is_redelivered}

        assert to_delivery(message, group="billing", topic="orders").delivery_count == count

    def test_is_two_where_a_message_was_pushed_to_a_process_that_was_lost(self, open_broker: Open, message: NewMessage, topic):
        lost, other = open_broker(), open_broker()
        receive(lost, topic, seconds=0)
        lost.send([message()])
        wait_until(lambda: lost.backlog("billing").waiting == {topic: 0})
        lost.close()

        assert [one.delivery_count for one in receive(other, topic)] == [2]


def receive(broker: RabbitMQBroker, topic: str, *, limit: int = 100, seconds: float = 5) -> list[Delivery]:
    return broker.receive("billing", [topic], limit=limit, invisible_for=HELD, wait=timedelta(seconds=seconds))


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [one.body for one in deliveries]


@contextmanager
def methods_sent() -> Iterator[Sequence[tuple[int, int]]]:
    """Record the methods that consumers send, in their order."""
    methods: list[tuple[int, int]] = []
    send = amqp.Channel.send_method

    def send_method(channel, sig, *arguments, **named):
        if sig in OF_CONSUMERS:
            methods.append(sig)
        return send(channel, sig, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amqp.Channel, "send_method", send_method)
        yield methods

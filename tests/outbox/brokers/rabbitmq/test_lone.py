"""What a message costs that comes alone, in waits and round trips and not in time, and what is left to other processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import amqp
import pytest
from amqp import spec

from outbox.brokers.base import Delivery, Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker, receiver
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.rabbitmq.acts import received
from tests.outbox.brokers.rabbitmq.conftest import HELD, Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]

OF_CONSUMERS = (spec.Basic.Qos, spec.Basic.Consume, spec.Basic.Cancel, spec.Basic.Ack, spec.Basic.Reject)


class TestLoneMessage:
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
        broker.ack([one(broker, topic)])

        assert waits == []

    def test_costs_an_acknowledgement_where_the_one_before_came_alone_too(self, broker, message: NewMessage, topic, monkeypatch):
        monkeypatch.setattr(receiver, "DUE_SECONDS", 600)
        come_alone(broker, message, topic)

        broker.send([message()])
        with methods_sent() as methods:
            broker.ack([one(broker, topic)])

        assert methods == [spec.Basic.Ack]

    def test_is_followed_by_many_at_once_where_they_wait(self, broker, message: NewMessage, topic):
        come_alone(broker, message, topic)

        broker.send([message() for _ in range(300)])
        sizes = []
        while sum(sizes) < 300:
            found = receive(broker, topic)
            broker.ack(found)
            sizes.append(len(found))

        assert len(sizes) <= receiver.COUNT_AFTER + 10
        assert max(sizes) > 20

    def test_comes_again_with_another_channel_where_it_was_lost_on_its_way(
        self, broker, message: NewMessage, topic, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(receiver, "CHANNEL_SECONDS", 0.5)
        lost = [False]
        note = receiver.RabbitMQReceiver._on_message
        monkeypatch.setattr(receiver.RabbitMQReceiver, "_on_message", lambda *arguments: lost[0] or note(*arguments))
        come_alone(broker, message, topic)
        lost[0] = True
        broker.send([message(b"a")])
        nothing = receive(broker, topic, seconds=1)
        lost[0] = False

        [found] = wait_until(lambda: receive(broker, topic, seconds=1))

        assert (nothing, found.body) == ([], b"a")

    def test_comes_over_a_new_connection_where_that_of_its_subscription_was_closed(
        self, broker, node: RabbitMQ, message: NewMessage, topic
    ):
        come_alone(broker, message, topic)
        node.control("close_all_connections", "a test")
        wait_until(lambda: broker.send([message(b"a")])[0].reason == "")

        [found] = wait_until(lambda: received(broker, topic))

        assert found.body == b"a"


class TestSeveralMessages:
    def test_leave_the_one_of_the_standing_subscription_for_the_end(self, broker, message: NewMessage, topic):
        broker.send([message() for _ in range(3)])
        found = wait_until(lambda: receive(broker, topic))

        with methods_sent() as methods:
            results = broker.ack(found)

        assert len(found) == 3
        assert results == [True] * 3
        assert methods == [spec.Basic.Ack, spec.Basic.Ack, spec.Basic.Cancel, spec.Basic.Ack]

    def test_wait_for_the_others_only_for_a_while(self, open_broker: Open, message: NewMessage, topic):
        broker, other = open_broker(), open_broker()
        broker.send([message() for _ in range(3)])
        found = wait_until(lambda: receive(broker, topic))

        with methods_sent() as methods:
            broker.ack(found[:2])
            wait_until(lambda: methods.count(spec.Basic.Ack) == 2)

        assert broker.ack(found[2:]) == [True]
        broker.close()
        assert received(other, topic) == []

    def test_are_acknowledged_when_the_broker_is_closed(self, open_broker: Open, message: NewMessage, topic):
        broker, other = open_broker(), open_broker()
        broker.send([message() for _ in range(2)])
        first, second = wait_until(lambda: receive(broker, topic))
        broker.ack([first])
        broker.close()

        again = wait_until(lambda: received(other, topic))

        assert [one.message_id for one in again] == [second.message_id]

    def test_are_taken_by_others_while_one_is_handled(self, open_broker: Open, message: NewMessage, topic):
        busy, free = open_broker(), open_broker()
        busy.send([message() for _ in range(3)])
        first, *others = wait_until(lambda: receive(busy, topic))
        busy.ack(others)

        busy.send([message(b"next")])
        next_ = one(free, topic)

        assert (next_.body, next_.delivery_count) == (b"next", 1)
        assert busy.ack([first]) == [True]


class TestOtherProcess:
    def test_gets_the_next_message_while_the_first_is_handled(self, open_broker: Open, message: NewMessage, topic):
        busy, free = open_broker(), open_broker()
        come_alone(busy, message, topic)

        busy.send([message(b"1")])
        first = one(busy, topic)
        busy.send([message(b"2")])
        second = one(free, topic)

        assert (first.body, second.body, second.delivery_count) == (b"1", b"2", 1)

    def test_gets_a_message_that_is_returned(self, open_broker: Open, message: NewMessage, topic):
        one_that_returns, free = open_broker(), open_broker()
        come_alone(one_that_returns, message, topic)

        one_that_returns.send([message(b"1")])
        one_that_returns.release([one(one_that_returns, topic)])
        found = one(free, topic)

        assert (found.body, found.delivery_count) == (b"1", 2)

    def test_gets_a_message_of_another_topic_while_one_is_handled(self, node: RabbitMQ, topic):
        names = [topic, f"{topic}-2"]
        options = {"NODES": [node.address], "GROUPS": {name: ["billing"] for name in names}}
        specs = [TopicSpec(name, TopicType.NORMAL) for name in names]
        busy, free = RabbitMQBroker("a", options, specs), RabbitMQBroker("b", options, specs)
        come_alone(busy, lambda: Outgoing("0", topic, b"0"), *names)

        busy.send([Outgoing("1", names[0], b"1")])
        first = one(busy, *names)
        busy.send([Outgoing("2", names[1], b"2")])
        second = one(free, *names)

        assert (first.body, second.body, second.delivery_count) == (b"1", b"2", 1)
        busy.close()
        free.close()


def come_alone(broker: RabbitMQBroker, message: Callable[[], Outgoing], *topics: str) -> None:
    """Receive two messages, one by one."""
    for _ in range(2):
        broker.send([message()])
        broker.ack([one(broker, *topics)])


def one(broker: RabbitMQBroker, *topics: str) -> Delivery:
    [found] = receive(broker, *topics)
    return found


def receive(broker: RabbitMQBroker, *topics: str, seconds: float = 5) -> list[Delivery]:
    return broker.receive("billing", topics, limit=100, invisible_for=HELD, wait=timedelta(seconds=seconds))


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

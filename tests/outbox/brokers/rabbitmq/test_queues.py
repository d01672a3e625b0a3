"""Queues and exchanges that are full, deleted or declared otherwise, and messages that the server refuses."""

from collections.abc import Callable
from datetime import timedelta

import amqp
import pytest

from outbox.brokers.base import Outgoing, SendStatus
from outbox.brokers.rabbitmq.topology import DUE
from outbox.errors import BrokerUnavailable
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.rabbitmq.acts import accepted, drain, receive_all, received, refused, statuses
from tests.outbox.brokers.rabbitmq.conftest import HELD, Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]


class TestDeletedLadder:
    def test_is_declared_again(self, broker, channel: amqp.Channel, message: NewMessage, topic):
        broker.send([message()])
        channel.exchange_delete(DUE)

        with pytest.raises(BrokerUnavailable, match=DUE):
            broker.receive("shipping", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        broker.receive("shipping", [topic], limit=1, invisible_for=HELD, wait=timedelta())

        broker.send([message(b"later")])
        [delivery] = broker.receive("shipping", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=5))
        assert delivery.body == b"later"


class TestFullQueue:
    def test_is_an_outage_until_somebody_receives(self, open_broker: Open, message: NewMessage, topic):
        broker = open_broker(MAX_LENGTH=3)
        filled = [result for _ in range(8) for result in broker.send([message()])]  # it takes some more than its length

        [held, *rest] = broker.receive("billing", [topic], limit=10, invisible_for=HELD, wait=timedelta(seconds=5))
        broker.ack([held, *rest])

        assert filled[-1].status is SendStatus.UNAVAILABLE
        assert "a queue is full" in filled[-1].reason
        assert statuses(wait_until(lambda: accepted(broker, message()))) == [SendStatus.ACCEPTED]


class TestFullQueueOfOneGroup:
    def test_leaves_copies_with_the_others(self, open_broker: Open, message: NewMessage, topic):
        broker = open_broker(MAX_LENGTH=3, GROUPS={topic: ["billing", "shipping"]})
        one = message()
        drained: list[str] = []

        def fill() -> bool:
            drained.extend(drain(broker, topic))
            return refused(broker, message()) is not None

        wait_until(fill)
        drained.clear()
        tries = []
        for _ in range(2):
            drain(broker, topic)
            tries += statuses(broker.send([one]))
            drained += wait_until(lambda: drain(broker, topic))

        assert tries == [SendStatus.UNAVAILABLE] * 2
        assert drained.count(one.message_id) == 2


class TestDeletedQueue:
    def test_is_declared_again_by_its_consumers_and_an_alert_until_then(
        self, broker, channel: amqp.Channel, message: NewMessage, topic
    ):
        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        broker.send([message()])
        channel.queue_delete(f"{topic}:billing")

        astray = broker.send([message()])
        with pytest.raises(BrokerUnavailable, match="no queue"):
            broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        later = broker.send([message(b"later")])

        assert statuses(astray) == [SendStatus.MISCONFIGURED]
        assert f"No queue takes messages of '{topic}'" in astray[0].reason
        assert statuses(later) == [SendStatus.ACCEPTED]
        assert [one.body for one in wait_until(lambda: received(broker, topic))] == [b"later"]


class TestDeletedExchange:
    def test_is_declared_again(self, broker, channel: amqp.Channel, message: NewMessage, topic):
        broker.send([message()])
        channel.exchange_delete(topic)

        first = broker.send([message()])
        second = broker.send([message()])

        assert statuses(first) == [SendStatus.MISCONFIGURED]
        assert "no exchange" in first[0].reason
        assert statuses(second) == [SendStatus.ACCEPTED]


class TestDeclaredOtherwise:
    def test_is_named_with_the_difference(self, open_broker: Open, message: NewMessage, topic):
        open_broker().send([message()])
        other = open_broker(MAX_LENGTH=5)

        [result] = other.send([message()])

        assert result.status is SendStatus.MISCONFIGURED
        assert "x-max-length" in result.reason
        assert "x-max-length" in other.check()[0].text
        with pytest.raises(BrokerUnavailable, match="x-max-length"):
            other.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())


class TestMessageTooLargeForTheServer:
    def test_is_refused_and_its_neighbours_taken(self, open_broker: Open, message: NewMessage, tmp_path):
        with RabbitMQ(tmp_path / "small", settings="max_message_size = 1000\n") as node:
            broker = open_broker(NODES=[node.address])

            results = broker.send([message(b"a"), message(b"x" * 2000), message(b"b")])

            assert statuses(results) == [SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.ACCEPTED]
            assert "message size" in results[1].reason
            broker.close()

    def test_costs_its_batch_one_more_round(self, open_broker: Open, message: NewMessage, topic, tmp_path):
        with RabbitMQ(tmp_path / "small", settings="max_message_size = 1000\n") as node:
            broker = open_broker(NODES=[node.address])
            bodies = [b"x" * 2000 if n in (7, 60) else b"%d" % n for n in range(100)]

            results = broker.send([message(body) for body in bodies])
            found = receive_all(broker, topic, 98)

            assert [one.status is SendStatus.REFUSED for one in results] == [len(body) == 2000 for body in bodies]
            assert max(found.count(one) for one in found) <= 2  # those before the large one may have been stored the first time
            assert (tmp_path / "small/log").read_text().count("caused a channel exception") == 1
            broker.close()


class TestDeliveryLimit:
    def test_makes_a_dead_letter_that_says_why(self, open_broker: Open, message: NewMessage, topic):
        broker = open_broker(DELIVERY_LIMIT=2)
        broker.send([message(b"poison")])

        for _ in range(3):
            deliveries = wait_until(lambda: received(broker, topic))
            broker.release(deliveries)

        [letter] = wait_until(lambda: broker.dead_letters("billing"))
        assert "delivered it too often" in letter.reason
        assert broker.replay("billing", [letter.id]) == 1
        assert [(one.body, one.attempt) for one in wait_until(lambda: received(broker, topic))] == [(b"poison", 1)]

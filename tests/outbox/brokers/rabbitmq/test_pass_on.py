"""An ordered topic, whose queue serves one process at a time, and messages that only another process can handle."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest

from outbox.brokers.base import Delivery, Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.brokers.rabbitmq.ordered import WINDOW
from outbox.errors import BrokerUnavailable
from outbox.message import TopicType
from tests.outbox.brokers.rabbitmq.acts import received
from tests.outbox.brokers.rabbitmq.conftest import HELD, Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

SECOND = timedelta(seconds=1)

NewMessage = Callable[..., Outgoing]


@pytest.fixture
def old(open_broker: Open) -> RabbitMQBroker:
    """The process of an old release, which has the queue."""
    return open_broker(TopicType.FIFO)


@pytest.fixture
def new(open_broker: Open, old: RabbitMQBroker, topic: str) -> RabbitMQBroker:
    """The process of a new release, which waits for its turn."""
    received(old, topic)
    new = open_broker(TopicType.FIFO)
    received(new, topic)
    return new


def bodies(deliveries: list[Delivery]) -> list[bytes]:
    return [one.body for one in deliveries]


class TestMessageForAnother:
    def test_goes_to_the_process_that_waits_with_all_behind_it(self, old, new, message: NewMessage, topic):
        old.send([message(b"%d" % n, key="a") for n in range(3)])
        [first] = wait_until(lambda: received(old, topic))

        is_passed = old.pass_on(first, SECOND)
        received(old, topic)
        found = []
        for _ in range(3):
            [one] = wait_until(lambda: received(new, topic))
            found.append(one.body)
            new.ack([one])

        assert is_passed
        assert found == [b"0", b"1", b"2"]

    def test_is_passed_on_when_the_others_of_its_process_are_settled(self, old, new, message: NewMessage, topic):
        old.send([message(b"for another", key="a"), message(b"mine", key="b"), message(b"next", key="b")])
        held = wait_until(lambda: received(old, topic))
        while len(held) < 2:
            held += received(old, topic)

        old.pass_on(held[0], SECOND)
        meanwhile = received(new, topic)
        is_acked = old.ack(held[1:])
        received(old, topic)
        found = wait_until(lambda: received(new, topic))
        while len(found) < 2:
            found += received(new, topic)

        assert meanwhile == []
        assert is_acked == [True]
        assert bodies(found) == [b"for another", b"next"]

    def test_comes_back_where_no_other_process_waits(self, old, message: NewMessage, topic):
        old.send([message(b"a", key="a")])
        [first] = wait_until(lambda: received(old, topic))

        old.pass_on(first, SECOND)
        began = time.monotonic()
        [again] = wait_until(lambda: received(old, topic))

        assert again.body == b"a"
        assert time.monotonic() - began > 0.9

    def test_leaves_no_more_than_a_window_standing(self, old, new, message: NewMessage, topic):
        count = WINDOW + 50
        old.send([message(b"%d" % n, key=str(n)) for n in range(count)])
        handled: list[bytes] = []

        def release_by_release() -> bool:
            for delivery in receive(old, topic):  # it handles the odd ones
                if int(delivery.body) % 2:
                    handled.append(delivery.body)
                    old.ack([delivery])
                else:
                    old.pass_on(delivery, SECOND)
            for delivery in receive(new, topic):
                handled.append(delivery.body)
                new.ack([delivery])
            return len(set(handled)) == count

        wait_until(release_by_release, 60)

        assert len(handled) == count


class TestHeldMessages:
    def test_are_counted_by_the_process_that_holds_them(self, old, new, message: NewMessage, topic):
        old.send([message(b"%d" % n, key="a") for n in range(20)])
        wait_until(lambda: received(old, topic))

        wait_until(lambda: new.backlog("billing") == {topic: 0})

        assert old.held("billing") == {topic: 20}
        assert new.held("billing") == {topic: 0}


def receive(broker: RabbitMQBroker, topic: str) -> list[Delivery]:
    with suppress(BrokerUnavailable):
        return broker.receive("billing", [topic], limit=50, invisible_for=HELD, wait=timedelta(milliseconds=50))
    return []


class TestMessageWithoutOrderForAnother:
    def test_is_left_to_the_others_when_its_delay_is_over(self, open_broker: Open, message: NewMessage, topic):
        old, new = open_broker(), open_broker()
        old.send([message(b"for another")])
        [one] = wait_until(lambda: received(old, topic))

        old.pass_on(one, SECOND)
        nothing = [*received(old, topic), *received(old, topic)]  # two seconds
        found = wait_until(lambda: received(new, topic))

        assert nothing == []
        assert bodies(found) == [b"for another"]

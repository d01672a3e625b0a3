"""What the server takes out of a group's queue by itself comes to the group all the same, with the server's reason."""

from collections.abc import Iterator

import pytest

from outbox.brokers.base import Broker, Delivery
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import Harness

pytestmark = pytest.mark.needs("HasDeadLetterQueue")

FIFO = TopicType.FIFO


@pytest.fixture(autouse=True)
def _acknowledged(acts: Acts, harness: Harness) -> Iterator[None]:
    """Leave nothing at the server that was given up: another test's group has the same name."""
    yield
    broker = harness.open()
    broker.ack(broker.receive_dead_letters("group", broker.topics, limit=100))


def receive_dead_letters(
    acts: Acts, kind: TopicType = TopicType.NORMAL, *, group: str = "group", count: int = 0, broker: Broker | None = None
) -> list[Delivery]:
    """Receive messages that the server gave up; tries again until there are `count`."""
    received: list[Delivery] = []
    for _ in acts.harness.tries():
        received += (broker or acts.broker).receive_dead_letters(group, [acts.harness.topic(kind)], limit=10)
        if len(received) >= count:
            break
    return received


def counted(acts: Acts, count: int) -> dict[str, int]:
    """Return the numbers of messages that were given up; tries again until they are `count` together."""
    for _ in acts.harness.tries():
        numbers: dict[str, int] = acts.broker.backlog("group").dead_letters
        if sum(numbers.values()) == count:
            break
    return numbers


class TestReceiveGivenUp:
    def test_returns_a_message_as_it_was_with_the_reason(self, acts: Acts, broker: Broker, harness: Harness):
        body, headers = bytes(range(256)), {"ce-source": "urn:shop", "who": 'Zoë "Z" \\'}
        message = acts.message(body=body, key="ключ-🐿", tag="placed", headers=headers)
        acts.send(message)
        harness.give_up("group", [message])

        [delivery] = receive_dead_letters(acts, count=1)

        assert delivery.dead_letter_reason
        assert (delivery.group, delivery.topic, delivery.message_id) == ("group", message.topic, message.message_id)
        assert (delivery.body, delivery.key, delivery.tag, delivery.headers) == (body, "ключ-🐿", "placed", headers)
        assert acts.receive() == []

    def test_returns_no_message_again_that_is_acknowledged(self, acts: Acts, broker: Broker, harness: Harness):
        harness.give_up("group", acts.send_bodies(b"a", b"b"))
        dead_letters = receive_dead_letters(acts, count=2)

        assert broker.ack(dead_letters) == [True, True]

        assert receive_dead_letters(acts, broker=harness.open()) == []
        assert counted(acts, 0) == {}
        assert acts.waiting(count=0) == 0

    def test_returns_a_message_again_that_is_not_acknowledged(self, acts: Acts, broker: Broker, harness: Harness):
        [message] = acts.send_bodies(b"a")
        harness.give_up("group", [message])
        receive_dead_letters(acts, count=1)
        broker.close()

        again = receive_dead_letters(acts, broker=harness.open(), count=1)

        assert [delivery.message_id for delivery in again] == [message.message_id]

    def test_returns_at_once_where_nothing_was_given_up(self, acts: Acts, broker: Broker, harness: Harness):
        assert broker.receive_dead_letters("group", [harness.topic(TopicType.NORMAL)], limit=10) == []

    def test_returns_nothing_of_another_group(self, acts: Acts, broker: Broker, harness: Harness):
        acts.receive(group="other")
        messages = acts.send_bodies(b"a")

        harness.give_up("group", messages)

        assert receive_dead_letters(acts, group="other") == []
        assert acts.bodies(group="other", count=1) == [b"a"]

    @pytest.mark.needs("supports_order")
    def test_lets_the_key_of_a_message_go_on(self, acts: Acts, harness: Harness):
        harness.give_up("group", acts.send_bodies(b"1", kind=FIFO, key="a"))

        acts.send_bodies(b"2", kind=FIFO, key="a")

        assert acts.bodies(FIFO, count=1) == [b"2"]


class TestCountGivenUp:
    def test_counts_by_topic(self, acts: Acts, harness: Harness):
        harness.give_up("group", acts.send_bodies(b"a", b"b"))

        assert counted(acts, 2) == {harness.topic(TopicType.NORMAL): 2}

    def test_knows_nothing_of_a_group_that_never_came(self, broker: Broker):
        assert broker.backlog("nobody").dead_letters == {}

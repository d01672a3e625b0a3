"""Order by key on topics of type fifo."""

import pytest

from outbox.brokers.base import Broker, Delivery
from outbox.message import TopicType
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import Harness

FIFO = TopicType.FIFO
BODIES = [b"1", b"2", b"3", b"4"]  # of one key
pytestmark = pytest.mark.needs("supports_order")


@pytest.fixture
def hand(acts: Acts) -> list[Delivery]:
    """Return the first hand of a key with four messages, which holds one or more of them."""
    acts.send_bodies(*BODIES, kind=FIFO, key="a")
    hand = acts.receive(FIFO, hold=INVISIBLE, count=1)
    assert [delivery.body for delivery in hand] == BODIES[: len(hand)]
    return hand


def receive_all(acts: Acts) -> list[Delivery]:
    """Receive and acknowledge hand after hand, and return what comes before another message of the key."""
    acts.send_bodies(b"last", kind=FIFO, key="a")
    received: list[Delivery] = []
    for _ in range(10):
        hand = acts.receive(FIFO, count=1)
        acts.broker.ack(hand)
        received += hand
        if received[-1:] and received[-1].body == b"last":
            return received[:-1]
    raise AssertionError(f"The last message did not come, but {[delivery.body for delivery in received]}.")


class TestOrder:
    def test_is_that_of_storage_for_each_key(self, acts: Acts, broker: Broker):
        keys = ["a", "b", "c"]
        acts.send(*[acts.message(FIFO, key=key, body=b"%d" % n) for n in range(5) for key in keys])
        seen: dict[str, list[bytes]] = {key: [] for key in keys}

        while sum(map(len, seen.values())) < 15:
            hand = acts.receive(FIFO, count=1)
            assert hand
            for delivery in hand:
                seen[delivery.key].append(delivery.body)
            broker.ack(hand)

        assert seen == {key: [b"0", b"1", b"2", b"3", b"4"] for key in keys}

    def test_gives_nobody_more_of_a_key_that_is_in_hand(self, acts: Acts, harness: Harness):
        acts.send_bodies(*BODIES, kind=FIFO, key="a")

        first = acts.bodies(FIFO, limit=1, count=1)
        others = [*acts.receive(FIFO), *acts.receive(FIFO, broker=harness.open())]

        assert first == [b"1"]
        assert others == []

    def test_is_each_groups_own(self, acts: Acts):
        acts.send_bodies(b"1", b"2", kind=FIFO, key="a")

        assert acts.bodies(FIFO, group="cart", count=1)[:1] == [b"1"]
        assert acts.bodies(FIFO, group="points", count=1)[:1] == [b"1"]


class TestKey:
    """A key begins again at its first message that is not acknowledged."""

    def test_begins_again_at_its_head_when_a_hand_is_released(self, acts: Acts, broker: Broker, hand: list[Delivery]):
        broker.release(hand)

        again = receive_all(acts)

        assert [delivery.body for delivery in again] == BODIES
        assert all(delivery.delivery_count > 1 for delivery in again[: len(hand)])

    def test_begins_again_behind_what_was_acknowledged(self, acts: Acts, broker: Broker, hand: list[Delivery]):
        broker.ack(hand[:1])
        broker.release(hand[1:])

        assert [delivery.body for delivery in receive_all(acts)] == BODIES[1:]

    def test_begins_again_at_its_head_when_the_time_is_over(self, acts: Acts, harness: Harness, hand: list[Delivery]):
        harness.pass_time(INVISIBLE)

        again = receive_all(acts)

        assert [delivery.body for delivery in again] == BODIES
        assert all(delivery.delivery_count > 1 for delivery in again[: len(hand)])

    @pytest.mark.parametrize("is_released", [True, False])
    def test_begins_again_at_its_head_when_only_later_ones_were_acknowledged(
        self, acts: Acts, broker: Broker, harness: Harness, hand: list[Delivery], is_released: bool
    ):
        broker.ack(hand[1:])
        if is_released:
            broker.release(hand[:1])
        else:
            harness.pass_time(INVISIBLE)

        again = [delivery.body for delivery in receive_all(acts)]

        assert again[0] == BODIES[0]
        assert again == sorted(set(again))

    def test_goes_on_behind_a_hand_that_was_acknowledged_backwards(self, acts: Acts, broker: Broker, hand: list[Delivery]):
        for delivery in reversed(hand):
            broker.ack([delivery])

        assert [delivery.body for delivery in receive_all(acts)] == BODIES[len(hand) :]

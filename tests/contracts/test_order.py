"""Order by key on topics of type fifo."""

from datetime import timedelta

import pytest

from outbox.brokers.base import Broker
from outbox.message import TopicType
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import Harness

FIFO = TopicType.FIFO
pytestmark = pytest.mark.needs("supports_order")


class TestOrder:
    def test_is_that_of_storage_for_each_key(self, acts: Acts, broker: Broker):
        keys = ["a", "b", "c"]
        acts.send(*[acts.message(FIFO, key=key, body=b"%d" % n) for n in range(5) for key in keys])
        seen: dict[str, list[bytes]] = {key: [] for key in keys}

        for _ in range(5):
            found = acts.receive(FIFO, count=len(keys))
            for delivery in found:
                seen[delivery.key].append(delivery.body)
            broker.ack(found)

        assert seen == {key: [b"0", b"1", b"2", b"3", b"4"] for key in keys}

    def test_lets_one_message_of_a_key_be_handled_at_a_time(self, acts: Acts, harness: Harness):
        acts.send_bodies(b"1", b"2", kind=FIFO, key="a")
        acts.send_bodies(b"3", kind=FIFO, key="b")

        first = acts.bodies(FIFO, count=2)
        second = [delivery.body for delivery in acts.receive(FIFO, broker=harness.open())]

        assert sorted(first) == [b"1", b"3"]
        assert second == []

    def test_holds_back_a_key_whose_head_is_to_be_retried_and_no_other(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"1", b"2", kind=FIFO, key="a")
        [head] = acts.receive(FIFO)
        broker.retry(head, timedelta(minutes=2))
        acts.send_bodies(b"3", kind=FIFO, key="b")

        meanwhile = acts.bodies(FIFO, count=1)
        harness.pass_time(timedelta(minutes=2))
        again = acts.receive_again(FIFO)

        assert meanwhile == [b"3"]
        assert [(delivery.body, delivery.delivery_count) for delivery in again] == [(b"1", 2)]

    def test_delivers_the_head_again_when_its_handler_died(self, acts: Acts, harness: Harness):
        acts.send_bodies(b"1", b"2", kind=FIFO, key="a")
        acts.receive(FIFO, hold=INVISIBLE)

        harness.pass_time(INVISIBLE)

        assert [(delivery.body, delivery.delivery_count) for delivery in acts.receive_again(FIFO)] == [(b"1", 2)]

    def test_goes_on_behind_a_dead_letter(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"1", b"2", kind=FIFO, key="a")
        [head] = acts.receive(FIFO)

        broker.dead_letter(head, "cannot be handled")

        assert acts.bodies(FIFO, count=1) == [b"2"]

    def test_is_each_groups_own(self, acts: Acts):
        acts.send_bodies(b"1", b"2", kind=FIFO, key="a")

        assert acts.bodies(FIFO, group="cart") == [b"1"]
        assert acts.bodies(FIFO, group="points") == [b"1"]

"""What waits, wherever it waits: it holds up nobody else, and it is counted."""

from datetime import timedelta

import pytest

from outbox.brokers.base import Broker
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import Harness

MANY = 70  # more than any broker has on the way at a time
LONG, SHORT = timedelta(hours=2), timedelta(minutes=2)

FIFO, DELAY = TopicType.FIFO, TopicType.DELAY


class TestManyThatWait:
    @pytest.mark.needs("supports_delay")
    def test_for_their_time_leave_another_its_own(self, acts: Acts, harness: Harness):
        late = [acts.message(DELAY, deliver_at=harness.now + LONG) for _ in range(MANY)]
        acts.send(*late, acts.message(DELAY, body=b"soon", deliver_at=harness.now + SHORT))

        harness.pass_time(SHORT)

        assert acts.bodies(DELAY, count=1) == [b"soon"]

    def test_in_one_topic_leave_another_topic_alone(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(*[b"%d" % n for n in range(MANY)])
        held = acts.receive(count=MANY)

        acts.send_bodies(b"other", kind=FIFO, key="a")
        [found] = acts.receive(FIFO, count=1)

        assert found.body == b"other"
        assert len(broker.renew(held, timedelta(minutes=20))) == MANY


class TestCounts:
    def test_change_nothing(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a")

        for _ in range(5):
            broker.backlog("group")

        [delivery] = acts.receive(count=1)
        assert (delivery.body, delivery.delivery_count) == (b"a", 1)

"""What waits, wherever it waits: it holds up nobody else, and it is counted."""

from datetime import timedelta

import pytest

from outbox.brokers.base import Broker, DelayedCount
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import Harness

MANY = 70  # more than any broker has on the way at a time; a delay queue of RabbitMQ has 32
LONG, SHORT = timedelta(hours=2), timedelta(minutes=2)

NORMAL, FIFO, DELAY = TopicType.NORMAL, TopicType.FIFO, TopicType.DELAY


class TestManyThatWait:
    def test_for_a_retry_leave_the_retry_of_another_its_time(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(*[b"%d" % n for n in range(MANY)])
        for delivery in acts.receive(group="cart", count=MANY):
            broker.retry(delivery, LONG)
        [first, *rest] = acts.receive(group="points", count=MANY)
        broker.ack(rest)

        broker.retry(first, SHORT)
        harness.pass_time(SHORT)

        assert [one.body for one in acts.receive_again(group="points")] == [first.body]
        assert acts.receive(group="cart") == []

    @pytest.mark.needs("supports_delay")
    def test_for_their_time_leave_another_its_own(self, acts: Acts, harness: Harness):
        late = [acts.message(DELAY, deliver_at=harness.now + LONG) for _ in range(MANY)]
        acts.send(*late, acts.message(DELAY, body=b"soon", deliver_at=harness.now + SHORT))

        harness.pass_time(SHORT)

        assert acts.bodies(DELAY, count=1) == [b"soon"]

    @pytest.mark.needs("supports_order")
    def test_behind_a_key_that_is_retried_leave_other_keys_alone(self, acts: Acts, broker: Broker):
        acts.send_bodies(*[b"%d" % n for n in range(MANY)], kind=FIFO, key="a")
        [head] = acts.receive(FIFO, count=1)
        broker.retry(head, LONG)

        acts.send_bodies(b"other", kind=FIFO, key="b")

        assert acts.bodies(FIFO, count=1) == [b"other"]

    def test_as_dead_letters_leave_their_group_the_next_message(self, acts: Acts, broker: Broker):
        acts.send_bodies(*[b"%d" % n for n in range(MANY)])
        for delivery in acts.receive(count=MANY):
            broker.dead_letter(delivery, "no such customer")

        acts.send_bodies(b"next")

        assert acts.bodies(count=1) == [b"next"]

    def test_in_one_topic_leave_another_topic_alone(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(*[b"%d" % n for n in range(MANY)])
        held = acts.receive(count=MANY)

        acts.send_bodies(b"other", kind=FIFO, key="a")
        [found] = acts.receive(FIFO, count=1)

        assert found.body == b"other"
        assert len(broker.renew(held, timedelta(minutes=20))) == MANY


class TestCounts:
    @pytest.mark.needs("supports_replay")
    def test_add_up_to_all_that_is_not_settled(self, acts: Acts, broker: Broker, harness: Harness):
        delayed_before = broker.delayed() or DelayedCount(0)  # of other tests on the same server
        acts.send_bodies(*[b"%d" % n for n in range(10)])
        done, dead, later, _held, *rest = acts.receive(limit=8, count=8)
        broker.ack([done])
        broker.dead_letter(dead, "no such customer")
        broker.retry(later, LONG)
        broker.release(rest)

        def counted() -> int:
            delayed = (broker.delayed() or DelayedCount(0)).waiting - delayed_before.waiting
            return acts.waiting() + broker.held("group").get(harness.topic(NORMAL), 0) + delayed + len(acts.dead_letters())

        expected = 9 if harness.counts_invisible else 7
        for _ in harness.tries():
            found = counted()
            if found == expected:
                break
        assert found == expected

    @pytest.mark.needs("supports_delay")
    def test_have_delayed_messages_where_the_broker_counts_them(self, acts: Acts, broker: Broker, harness: Harness):
        before = broker.delayed()
        acts.send(*[acts.message(DELAY, deliver_at=harness.now + LONG) for _ in range(3)])

        for _ in harness.tries():
            after = broker.delayed()
            if before is None or after.waiting == before.waiting + 3:
                break

        assert (after and after.waiting) == (before and before.waiting + 3)

    @pytest.mark.needs("supports_replay")
    def test_change_nothing(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a")
        broker.dead_letter(acts.receive(count=1)[0], "no such customer")
        acts.send_bodies(b"b")

        for _ in range(5):
            broker.backlog("group")
            broker.held("group")
            broker.delayed()

        [delivery] = acts.receive(count=1)
        [letter] = acts.dead_letters(count=1)
        assert (delivery.body, delivery.delivery_count, letter.delivery_count) == (b"b", 1, 1)

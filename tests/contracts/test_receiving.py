"""Consumer groups: who is handed what, for how long, and what becomes of it."""

import threading
import time
from datetime import timedelta
from itertools import compress

import pytest

from outbox.brokers.base import Broker
from outbox.errors import UnknownTopic
from outbox.message import TopicType
from tests.contracts.acts import HELD, INVISIBLE, NO_TIME, Acts
from tests.contracts.harness import Harness
from tests.waiting import run_at_once

NORMAL = TopicType.NORMAL


class TestReceive:
    def test_gives_every_group_every_message(self, acts: Acts):
        acts.send_bodies(b"a", b"b")

        seen = [sorted(acts.bodies(group=group)) for group in ("cart", "points", "shipment")]

        assert seen == [[b"a", b"b"]] * 3

    def test_gives_a_message_to_one_member_of_a_group(self, acts: Acts, harness: Harness):
        acts.send_bodies(b"a", b"b")

        first = acts.receive()
        second = acts.receive(broker=harness.open())

        assert len(first) == 2
        assert second == []

    def test_gives_a_new_group_what_was_there_before_it(self, acts: Acts):
        acts.send_bodies(b"old")
        acts.receive(group="old-group")

        assert acts.bodies(group="new-group") == [b"old"]

    @pytest.mark.needs("can_start_at_the_end")
    def test_gives_a_new_group_nothing_of_before_when_it_starts_at_the_end(self, acts: Acts, harness: Harness):
        acts.send_bodies(b"old")
        broker = harness.open(START="latest")
        acts.receive(broker=broker)

        acts.send_bodies(b"new")

        assert [delivery.body for delivery in acts.receive(broker=broker)] == [b"new"]

    def test_gives_no_more_than_the_limit(self, acts: Acts):
        acts.send(*[acts.message(key=str(n)) for n in range(25)])  # without keys, chance may put more than 10 into a partition

        counts = [len(acts.receive(limit=10)) for _ in range(4)]

        assert counts == [10, 10, 5, 0]

    def test_reads_several_topics_at_once(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        acts.send_bodies(b"b", kind=TopicType.FIFO, key="k")
        topics = [harness.topic(NORMAL), harness.topic(TopicType.FIFO)]

        found = broker.receive("group", topics, limit=10, invisible_for=HELD, wait=NO_TIME)

        assert {(delivery.topic, delivery.body) for delivery in found} == {
            (harness.topic(NORMAL), b"a"),
            (harness.topic(TopicType.FIFO), b"b"),
        }

    @pytest.mark.needs("supports_order", "supports_delay", "HalfMessages")
    def test_reads_topics_of_all_types_at_once(self, acts: Acts, broker: Broker, harness: Harness):
        kinds = [NORMAL, TopicType.FIFO, TopicType.DELAY]
        for kind in kinds:
            acts.send_bodies(str(kind).encode(), kind=kind, key="k")
        acts.end(*acts.send_halves(acts.message(TopicType.TRANSACTION, body=b"transaction")))
        topics = [topic.name for topic in harness.topics.values()]

        found = broker.receive("group", topics, limit=10, invisible_for=HELD, wait=NO_TIME)

        assert sorted(delivery.body for delivery in found) == [b"delay", b"fifo", b"normal", b"transaction"]

    def test_refuses_a_topic_it_was_not_given(self, broker: Broker):
        with pytest.raises(UnknownTopic):
            broker.receive("group", ["elsewhere"], limit=1, invisible_for=HELD, wait=NO_TIME)

    def test_leaves_it_to_the_group_which_tags_it_wants(self, acts: Acts):
        acts.send(*[acts.message(tag=tag) for tag in ("placed", "paid", "")])

        assert sorted(delivery.tag for delivery in acts.receive(count=3)) == ["", "paid", "placed"]

    def test_shares_between_receivers_without_overlap(self, acts: Acts, harness: Harness):
        sent = [message for n in range(30) for message in acts.send_bodies(*[b"%d" % n] * 10)]
        taken: list[str] = []

        def work(mine: Broker) -> None:
            while len(taken) < len(sent):
                found = acts.receive(broker=mine, limit=7)
                acked = mine.ack(found)
                assert all(acked) or harness.reassigns_queues  # then another receiver is given the message
                taken.extend(delivery.message_id for delivery in compress(found, acked))

        run_at_once(work, *[harness.open() for _ in range(3)])

        assert sorted(taken) == sorted(message.message_id for message in sent)
        assert acts.receive() == []
        assert acts.waiting(count=0) == 0


class TestWait:
    def test_returns_an_empty_list_after_its_time(self, acts: Acts):
        started = time.monotonic()

        found = acts.receive(wait=timedelta(seconds=0.2))

        assert found == []
        assert time.monotonic() - started >= 0.2

    def test_ends_when_a_message_comes(self, acts: Acts, harness: Harness, monkeypatch: pytest.MonkeyPatch):
        harness.without_polls(monkeypatch)
        acts.receive()
        started = time.monotonic()
        sender = threading.Timer(0.2, lambda: harness.open().send([acts.message(body=b"late")]))
        sender.start()

        found = acts.receive(wait=timedelta(seconds=50))

        sender.join()
        assert [delivery.body for delivery in found] == [b"late"]
        assert time.monotonic() - started < 45


class TestAck:
    def test_finishes_a_message(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a", b"b")
        deliveries = acts.receive(hold=INVISIBLE * 2)

        assert broker.ack(deliveries) == [True, True]

        harness.pass_time(INVISIBLE * 3)
        assert acts.receive() == []
        assert acts.waiting(count=0) == 0

    @pytest.mark.needs("refuses_second_ack")
    def test_counts_once(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a")
        deliveries = acts.receive()
        broker.ack(deliveries)

        assert broker.ack(deliveries) == [False]

    @pytest.mark.needs("refuses_second_ack")
    def test_answers_each_of_a_batch(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a", b"b", b"c")
        first, second, third = acts.receive()
        broker.ack([second])

        assert broker.ack([first, second, third]) == [True, False, True]

    @pytest.mark.needs("not ends_late")
    def test_changes_nothing_when_it_comes_late(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        late = acts.receive(hold=INVISIBLE)

        harness.pass_time(INVISIBLE)

        assert broker.ack(late) == [False]
        assert [delivery.body for delivery in acts.receive_again()] == [b"a"]

    @pytest.mark.needs("ends_late")
    def test_may_come_late_as_long_as_nobody_else_was_handed_the_message(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        late = acts.receive(hold=INVISIBLE)

        harness.pass_time(INVISIBLE * 3)

        assert broker.ack(late) == [True]
        assert acts.receive() == []

    def test_changes_nothing_when_another_holds_the_message(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        [late] = acts.receive(hold=INVISIBLE)
        harness.pass_time(INVISIBLE)
        [held] = acts.receive_again()

        assert broker.ack([late]) == [False]
        assert broker.ack([held]) == [True]

    def test_of_nothing_answers_nothing(self, broker: Broker):
        assert broker.ack([]) == []


class TestInvisibility:
    def test_hides_a_message_until_it_ends(self, acts: Acts, harness: Harness):
        acts.send_bodies(b"a")
        hidden_at = harness.age()
        [first] = acts.receive(hold=INVISIBLE)

        [again] = acts.receive_while_time_passes(INVISIBLE, count=1)

        second = again.delivery
        assert again.age - hidden_at >= INVISIBLE
        assert (first.delivery_count, second.delivery_count > 1) == (1, True)
        assert (second.message_id, second.body) == (first.message_id, b"a")
        assert second.receipt != first.receipt


class TestDeliveryCount:
    def test_is_1_for_each_group_on_its_own(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a")
        broker.release(acts.receive(group="cart", count=1))

        first = [delivery.delivery_count for delivery in acts.receive(group="points", count=1)]
        again = [delivery.delivery_count > 1 for delivery in acts.receive_again(group="cart")]

        assert (first, again) == ([1], [True])

    @pytest.mark.parametrize("kind", [NORMAL, TopicType.FIFO])
    def test_is_not_1_for_what_a_member_held_that_has_stopped(self, acts: Acts, harness: Harness, kind: TopicType):
        acts.send(*[acts.message(kind, key=f"key {n}") for n in range(5)])
        stopped = harness.open()
        held = {delivery.message_id for delivery in acts.receive(kind, broker=stopped, limit=3, hold=INVISIBLE, count=3)}

        stopped.close()
        found = [aged.delivery for aged in acts.receive_while_time_passes(INVISIBLE * 2, kind, count=5)]

        assert len(held) == 3
        assert len(found) == 5
        assert {delivery.message_id for delivery in found if delivery.delivery_count > 1} >= held


class TestBacklog:
    @pytest.mark.needs("counts_what_is_handled")
    def test_counts_what_waits_and_what_is_being_handled(self, acts: Acts, broker: Broker):
        acts.send_bodies(*[b"%d" % n for n in range(10)])
        held = acts.receive(limit=4)

        before = acts.waiting()
        broker.ack(held[:3])

        assert before == 10
        assert acts.waiting() == 7

    def test_knows_nothing_of_a_group_that_never_came(self, broker: Broker):
        assert broker.backlog("nobody").waiting == {}


@pytest.mark.needs("Lookups")
class TestFind:
    def test_knows_a_visible_message(self, acts: Acts):
        [message] = acts.send_bodies(b"a")

        [found] = acts.find(message.message_id, "visible")

        assert (found.message_id, found.topic, found.state) == (message.message_id, message.topic, "visible")
        assert acts.harness.is_now(found.stored_at)

    def test_knows_nothing_of_a_message_that_never_came(self, broker: Broker):
        assert broker.find("0190c1f8-0000-7000-8000-000000000000") == []

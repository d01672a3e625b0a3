"""Deliveries that are held longer, or handed back: a handler may take its time, and what waits behind it need not."""

import pytest

from outbox.brokers.base import Broker, Delivery
from outbox.message import TopicType
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import Harness

LONG = INVISIBLE * 4  # time enough to renew on a busy machine
LONGER = INVISIBLE * 10
MANY = 12  # messages: of each of a topic's queues come several at once


class TestRenew:
    def test_keeps_a_message_from_others_when_its_first_time_is_over(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        [delivery] = acts.receive(hold=LONG)
        harness.pass_time(LONG / 2)

        [held] = broker.renew([delivery], LONGER)

        harness.pass_time(LONG)
        assert acts.receive(broker=harness.open()) == []
        assert held is not None
        assert broker.ack([held]) == [True]
        harness.pass_time(LONGER)
        assert acts.receive() == []

    def test_leaves_all_but_the_receipt_as_it_was(self, acts: Acts, broker: Broker):
        acts.send(acts.message(body=b"a", key="k", headers={"who": "Zoë"}))
        [delivery] = acts.receive(hold=LONG)

        [held] = broker.renew([delivery], LONGER)

        assert held is not None
        assert (held.message_id, held.body, held.key, held.headers) == (delivery.message_id, b"a", "k", {"who": "Zoë"})
        assert (held.group, held.topic, held.delivery_count) == (delivery.group, delivery.topic, 1)

    def test_holds_a_message_until_the_new_time_is_over(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        [delivery] = acts.receive(hold=LONGER)

        [held] = broker.renew([delivery], INVISIBLE)

        assert held is not None
        harness.pass_time(INVISIBLE)
        [again] = acts.receive_again()
        assert again.body == b"a"
        assert again.delivery_count > 1
        assert broker.ack([held]) == [False]

    def test_may_be_repeated(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        [delivery] = acts.receive(hold=LONG)
        held: Delivery | None = delivery

        for _ in range(3):
            harness.pass_time(LONG / 2)
            assert held is not None
            [held] = broker.renew([held], LONG)

        assert held is not None
        assert acts.receive(broker=harness.open()) == []
        assert broker.ack([held]) == [True]

    @pytest.mark.needs("ends_late")
    def test_holds_a_message_again_whose_time_was_over(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        late = acts.receive(hold=INVISIBLE)
        harness.pass_time(INVISIBLE * 3)

        [held] = broker.renew(late, LONGER)

        assert acts.receive(broker=harness.open()) == []
        assert held is not None
        assert broker.ack([held]) == [True]

    @pytest.mark.needs("not ends_late")
    def test_is_refused_when_the_time_was_over(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        late = acts.receive(hold=INVISIBLE)

        harness.pass_time(INVISIBLE)

        assert broker.renew(late, LONGER) == [None]
        assert [delivery.body for delivery in acts.receive_again()] == [b"a"]

    def test_is_refused_when_another_holds_the_message(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        late = acts.receive(hold=INVISIBLE)
        harness.pass_time(INVISIBLE)
        [held] = acts.receive_again()

        assert broker.renew(late, LONGER) == [None]
        assert broker.ack([held]) == [True]

    @pytest.mark.needs("refuses_second_ack")
    def test_answers_each_of_a_batch(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a", b"b", b"c")
        first, second, third = acts.receive()
        broker.ack([second])

        held = broker.renew([first, second, third], LONGER)

        assert [one and one.message_id for one in held] == [first.message_id, None, third.message_id]

    def test_gives_what_ends_for_good_with_all_that_came_beside_it(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(*[b"a"] * MANY)
        held = broker.renew(acts.receive(count=MANY), 2 * INVISIBLE)

        answers = broker.ack([one for one in held if one is not None])

        assert answers == [True] * MANY
        harness.pass_time(4 * INVISIBLE)
        assert acts.receive() == []

    def test_gives_what_is_handed_out_once_with_all_that_came_beside_it(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(*[b"a"] * MANY)
        held = broker.renew(acts.receive(count=MANY), 2 * INVISIBLE)

        broker.release([one for one in held if one is not None])

        again = acts.receive_again(count=MANY)
        harness.pass_time(4 * INVISIBLE)
        again += acts.receive()
        assert len({one.message_id for one in again}) == len(again) == MANY

    def test_of_nothing_answers_nothing(self, broker: Broker):
        assert broker.renew([], LONGER) == []

    @pytest.mark.needs("supports_order")
    def test_holds_back_the_key_as_long(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"1", b"2", kind=TopicType.FIFO, key="a")
        head = acts.receive(TopicType.FIFO, limit=1, hold=LONG)
        harness.pass_time(LONG / 2)

        [held] = broker.renew(head, LONGER)

        harness.pass_time(LONG)
        assert acts.receive(TopicType.FIFO) == []
        assert held is not None
        broker.ack([held])
        assert acts.bodies(TopicType.FIFO, count=1) == [b"2"]


class TestRelease:
    @pytest.mark.needs("moves_between_members")
    def test_lets_others_have_the_message_at_once(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a", b"b")
        by_body = {delivery.body: delivery for delivery in acts.receive(count=2)}

        broker.release([by_body[b"a"]])

        other = harness.open()
        again = acts.receive(broker=other, count=1)
        assert [one.body for one in again] == [b"a"]
        assert again[0].delivery_count > 1
        assert [*broker.ack([by_body[b"b"]]), *other.ack(again)] == [True, True]

    @pytest.mark.needs("ends_late", "moves_between_members")
    def test_leaves_the_old_delivery_nothing_to_end(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        old = acts.receive()

        broker.release(old)

        held = acts.receive(broker=harness.open(), count=1)
        assert broker.ack(old) == [False]
        assert broker.ack(held) == [True]

    @pytest.mark.needs("refuses_second_ack")
    def test_brings_nothing_back_that_is_done(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a")
        done = acts.receive()
        broker.ack(done)

        broker.release(done)

        assert acts.receive() == []
        assert acts.waiting() == 0

    def test_takes_nothing_from_another_who_holds_the_message(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        late = acts.receive(hold=INVISIBLE)
        harness.pass_time(INVISIBLE)
        held = acts.receive_again()

        broker.release(late)

        assert acts.receive() == []
        assert broker.ack(held) == [True]

    def test_leaves_the_old_delivery_what_may_come_late(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a")
        old = acts.receive()

        broker.release(old)
        broker.ack(old)
        broker.ack(acts.receive())

        assert acts.waiting(count=0) == 0

    @pytest.mark.needs("supports_order")
    def test_hands_the_head_of_a_key_back(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"1", b"2", kind=TopicType.FIFO, key="a")

        broker.release(acts.receive(TopicType.FIFO))

        assert acts.bodies(TopicType.FIFO, count=1)[:1] == [b"1"]

    def test_of_nothing_does_nothing(self, broker: Broker):
        broker.release([])


@pytest.mark.needs("knows_open_deliveries")
class TestMayDeliverAgain:
    def test_names_what_the_group_has_not_ended(self, acts: Acts, broker: Broker):
        ids = {body: acts.send_bodies(body)[0].message_id for body in (b"done", b"released", b"held")}
        held = {delivery.body: delivery for delivery in acts.receive()}
        broker.ack([held[b"done"]])
        broker.release([held[b"released"]])
        [unread] = acts.send_bodies(b"unread")

        found = broker.may_deliver_again("group", [*ids.values(), unread.message_id])

        assert found == {ids[b"released"], ids[b"held"], unread.message_id}

    def test_names_only_what_it_was_asked_about(self, acts: Acts, broker: Broker):
        asked, _ = acts.send_bodies(b"a", b"b")
        acts.receive()

        assert broker.may_deliver_again("group", [asked.message_id]) == {asked.message_id}

    def test_is_each_groups_own(self, acts: Acts, broker: Broker):
        [message] = acts.send_bodies(b"a")
        acts.receive(group="slow")
        broker.ack(acts.receive(group="fast"))

        assert broker.may_deliver_again("slow", [message.message_id]) == {message.message_id}
        assert broker.may_deliver_again("fast", [message.message_id]) == set()
        assert broker.may_deliver_again("nobody", [message.message_id]) == set()

"""Deliveries that are held longer: a handler may take its time."""

from datetime import timedelta

import pytest

from outbox.brokers.base import Broker, Delivery
from outbox.message import TopicType
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import Harness

LONG = INVISIBLE * 4  # time enough to renew on a busy machine
LONGER = INVISIBLE * 10


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
        assert (held.group, held.topic, held.attempt) == (delivery.group, delivery.topic, 1)

    def test_holds_a_message_until_the_new_time_is_over(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        [delivery] = acts.receive(hold=LONGER)

        [held] = broker.renew([delivery], INVISIBLE)

        assert held is not None
        harness.pass_time(INVISIBLE)
        [again] = acts.receive_again()
        assert (again.body, again.attempt) == (b"a", 2)
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

    def test_of_nothing_answers_nothing(self, broker: Broker):
        assert broker.renew([], LONGER) == []

    def test_gives_what_can_be_retried(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a")
        [held] = broker.renew(acts.receive(hold=LONG), LONGER)
        assert held is not None

        assert broker.retry(held, timedelta()) is True

        assert [(again.body, again.attempt) for again in acts.receive_again()] == [(b"a", 2)]

    def test_gives_what_can_be_put_aside(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"a")
        [held] = broker.renew(acts.receive(hold=LONG), LONGER)
        assert held is not None

        assert broker.dead_letter(held, "cannot be read") is True

        assert acts.receive() == []

    @pytest.mark.needs("supports_order")
    def test_holds_back_the_key_as_long(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"1", b"2", kind=TopicType.FIFO, key="a")
        head = acts.receive(TopicType.FIFO, hold=LONG)
        harness.pass_time(LONG / 2)

        [held] = broker.renew(head, LONGER)

        harness.pass_time(LONG)
        assert acts.receive(TopicType.FIFO) == []
        assert held is not None
        broker.ack([held])
        assert acts.bodies(TopicType.FIFO, count=1) == [b"2"]

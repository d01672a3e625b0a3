"""Dead letters: kept for a person, who has them delivered again or discards them."""

import pytest

from outbox.brokers.base import Broker
from outbox.message import TopicType
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import Harness


class TestDeadLetter:
    def test_goes_on_with_the_next(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"poison", b"good")
        by_body = {delivery.body: delivery for delivery in acts.receive(hold=INVISIBLE * 2)}

        assert broker.dead_letter(by_body[b"poison"], "cannot be read") is True

        assert broker.ack([by_body[b"good"]]) == [True]
        harness.pass_time(INVISIBLE * 3)
        assert acts.receive() == []
        assert acts.waiting(count=0) == 0

    @pytest.mark.needs("supports_lookups", "finds_dead_letters")
    def test_is_found_as_such(self, acts: Acts, broker: Broker):
        [poison] = acts.send_bodies(b"poison")
        [delivery] = acts.receive()

        broker.dead_letter(delivery, "cannot be read")

        acts.find(poison.message_id, "dead_letter")

    @pytest.mark.needs("supports_replay")
    def test_is_listed_for_its_group(self, acts: Acts, broker: Broker, harness: Harness):
        [message] = acts.send_bodies(b"poison")
        [delivery] = acts.receive()

        broker.dead_letter(delivery, "cannot be read")

        [letter] = acts.dead_letters(count=1)
        assert (letter.message_id, letter.topic, letter.group) == (message.message_id, message.topic, "group")
        assert letter.attempt == 1
        assert harness.is_now(letter.died_at)
        assert acts.dead_letters("other") == []

    @pytest.mark.needs("supports_replay", "keeps_reasons")
    def test_is_listed_with_its_reason(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"poison")
        [delivery] = acts.receive()

        broker.dead_letter(delivery, "cannot be read")

        assert [letter.reason for letter in acts.dead_letters(count=1)] == ["cannot be read"]

    @pytest.mark.needs("supports_replay")
    def test_is_listed_oldest_first_up_to_a_limit(self, acts: Acts, broker: Broker):
        sent = []
        for body in (b"a", b"b", b"c"):
            sent += [message.message_id for message in acts.send_bodies(body)]
            [delivery] = acts.receive()
            broker.dead_letter(delivery, "cannot be read")

        assert [letter.message_id for letter in acts.dead_letters(count=3)] == sent
        assert len(broker.dead_letters("group", limit=2)) == 2

    @pytest.mark.needs("supports_replay")
    def test_is_delivered_again_when_an_operator_replays_it(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"poison", b"worse")
        for delivery in acts.receive():
            broker.dead_letter(delivery, "cannot be read")
        first, second = acts.dead_letters(count=2)

        count = broker.replay("group", [first.id])

        assert count == 1
        assert [(again.message_id, again.attempt) for again in acts.receive()] == [(first.message_id, 1)]
        assert [letter.id for letter in acts.dead_letters()] == [second.id]

    @pytest.mark.needs("supports_replay")
    def test_is_delivered_again_as_it_was(self, acts: Acts, broker: Broker):
        body, headers = bytes(range(256)), {"ce-source": "urn:shop", "who": 'Zoë "Z" \\ \x00'}
        acts.send(acts.message(body=body, key="ключ-🐿", tag="placed", headers=headers))
        [first] = acts.receive()
        broker.dead_letter(first, "cannot be read")

        broker.replay("group", [letter.id for letter in acts.dead_letters(count=1)])

        [again] = acts.receive()
        assert (again.body, again.key, again.tag, again.headers) == (body, "ключ-🐿", "placed", headers)

    @pytest.mark.needs("supports_replay")
    def test_is_delivered_again_to_no_other_group(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"poison")
        [delivery] = acts.receive()
        broker.dead_letter(delivery, "cannot be read")
        broker.ack(acts.receive(group="other"))

        broker.replay("group", [letter.id for letter in acts.dead_letters(count=1)])

        assert acts.receive(group="other") == []
        assert acts.bodies() == [b"poison"]

    @pytest.mark.needs("supports_replay")
    def test_is_delivered_again_once(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"poison")
        [delivery] = acts.receive()
        broker.dead_letter(delivery, "cannot be read")
        [letter] = acts.dead_letters(count=1)

        counts = [broker.replay("group", ids) for ids in ([letter.id, letter.id], [letter.id])]

        assert counts == [1, 0]
        assert acts.bodies() == [b"poison"]

    @pytest.mark.needs("supports_replay")
    def test_is_gone_when_an_operator_discards_it(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"poison", b"worse")
        for delivery in acts.receive():
            broker.dead_letter(delivery, "cannot be read")
        first, second = acts.dead_letters(count=2)

        counts = [broker.discard("group", [first.id]), broker.discard("group", [first.id]), broker.replay("group", [first.id])]

        assert counts == [1, 0, 0]
        assert [letter.id for letter in acts.dead_letters()] == [second.id]
        assert acts.receive() == []

    @pytest.mark.needs("supports_replay", "supports_lookups", "finds_dead_letters")
    def test_may_die_again(self, acts: Acts, broker: Broker):
        [poison] = acts.send_bodies(b"poison")
        for _ in range(2):
            [delivery] = acts.receive()
            broker.dead_letter(delivery, "cannot be read")
            [letter] = acts.dead_letters(count=1)
            acts.find(poison.message_id, "dead_letter")
            broker.replay("group", [letter.id])
            acts.find(poison.message_id, "visible")

        assert [delivery.attempt for delivery in acts.receive()] == [1]
        assert acts.dead_letters() == []

    @pytest.mark.needs("supports_replay", "supports_order", "supports_half_messages")
    @pytest.mark.parametrize("kind", [TopicType.FIFO, TopicType.TRANSACTION, TopicType.DELAY])
    def test_is_delivered_again_on_a_topic_of_any_type(self, acts: Acts, broker: Broker, kind: TopicType):
        message = acts.message(kind, key="a")
        if kind is TopicType.TRANSACTION:
            acts.end(*acts.send_halves(message))
        else:
            acts.send(message)
        [delivery] = acts.receive(kind)
        broker.dead_letter(delivery, "cannot be read")
        [letter] = acts.dead_letters(count=1)

        broker.replay("group", [letter.id])

        assert [(again.message_id, again.attempt) for again in acts.receive(kind)] == [(message.message_id, 1)]


@pytest.mark.needs("delivers_again")
class TestDeliverAgain:
    def test_hands_a_finished_message_to_its_group_as_if_for_the_first_time(self, acts: Acts, broker: Broker):
        [message] = acts.send_bodies(b"a")
        broker.ack(acts.receive())

        found = broker.deliver_again("group", [message.message_id])

        assert found == {message.message_id}
        assert [(again.message_id, again.attempt) for again in acts.receive()] == [(message.message_id, 1)]

    def test_hands_it_to_no_other_group(self, acts: Acts, broker: Broker):
        [message] = acts.send_bodies(b"a")
        broker.ack([*acts.receive(), *acts.receive(group="other")])

        broker.deliver_again("group", [message.message_id])

        assert acts.receive(group="other") == []

    def test_leaves_what_the_group_still_has_before_it(self, acts: Acts, broker: Broker):
        held, waiting = acts.send_bodies(b"a")[0], "0190c1f8-0000-7000-8000-000000000000"
        acts.receive()

        assert broker.deliver_again("group", [held.message_id, waiting]) == set()

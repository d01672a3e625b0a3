"""Dead letters: kept for a person, who has them delivered again or discards them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from outbox.brokers.base import Broker, BrokerDeadLetter
from outbox.errors import BrokerUnavailable
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
        assert letter.delivery_count == 1
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

        replayed = broker.replay("group", [first.id])

        assert replayed == {first.id}
        assert [(again.message_id, again.delivery_count) for again in acts.receive(count=1)] == [(first.message_id, 1)]
        assert [letter.id for letter in acts.dead_letters()] == [second.id]

    @pytest.mark.needs("supports_replay")
    def test_is_not_settled_by_the_consumer_that_had_it_before_the_replay(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"poison")
        [stale] = acts.receive()
        broker.dead_letter(stale, "cannot be read")
        broker.replay("group", [letter.id for letter in acts.dead_letters(count=1)])
        [again] = acts.receive(count=1)

        broker.ack([stale])  # RocketMQ answers that it was done, of a place that is not the replayed message's
        broker.release([again])

        assert [one.body for one in acts.receive(count=1)] == [b"poison"]

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

        replayed = [broker.replay("group", ids) for ids in ([letter.id, letter.id], [letter.id])]

        assert replayed == [{letter.id}, set()]
        assert acts.bodies() == [b"poison"]

    @pytest.mark.needs("supports_replay")
    def test_is_gone_when_an_operator_discards_it(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"poison", b"worse")
        for delivery in acts.receive():
            broker.dead_letter(delivery, "cannot be read")
        first, second = acts.dead_letters(count=2)

        settled = [broker.discard("group", [first.id]), broker.discard("group", [first.id]), broker.replay("group", [first.id])]

        assert settled == [{first.id}, set(), set()]
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

        assert [delivery.delivery_count for delivery in acts.receive(count=1)] == [1]
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

        assert [(again.message_id, again.delivery_count) for again in acts.receive(kind, count=1)] == [(message.message_id, 1)]


@pytest.mark.needs("supports_replay")
class TestCountDeadLetters:
    def test_counts_those_of_a_group_by_topic(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"poison", b"worse")
        acts.send(acts.message(TopicType.FIFO, key="a"))
        for delivery in [*acts.receive(count=2), *acts.receive(TopicType.FIFO, count=1)]:
            broker.dead_letter(delivery, "cannot be read")

        found = acts.counted(count=3)

        assert found == {acts.harness.topic(TopicType.NORMAL): 2, acts.harness.topic(TopicType.FIFO): 1}
        assert acts.counted("other") == {}

    def test_is_as_exact_after_many_looks(self, acts: Acts, broker: Broker):
        acts.send_bodies(b"poison", b"worse")
        for delivery in acts.receive(count=2):
            broker.dead_letter(delivery, "cannot be read")
        first, _ = before = acts.dead_letters(count=2)

        looks = [(broker.dead_letters("group", limit=1 + look % 2), acts.counted())[1] for look in range(30)]

        assert looks == [{first.topic: 2}] * 30
        assert acts.dead_letters(count=2) == before


@pytest.mark.needs("supports_replay")
class TestManyDeadLetters:
    @pytest.fixture
    def letters(self, acts: Acts, broker: Broker, harness: Harness) -> list[BrokerDeadLetter]:
        left = harness.many_letters
        while left:
            acts.send_bodies(*[b"poison"] * min(left, 100))
            for delivery in acts.receive(count=min(left, 100)):
                broker.dead_letter(delivery, "cannot be read")
                left -= 1
        return acts.dead_letters(count=harness.many_letters)

    def test_are_listed_each_once(self, letters: list[BrokerDeadLetter], acts: Acts, harness: Harness):
        looks = [acts.dead_letters() for _ in range(5)]

        assert len({letter.id for letter in letters}) == len(letters) == harness.many_letters
        assert looks == [letters] * 5

    def test_are_replayed_and_discarded_in_one_call_each(self, letters: list[BrokerDeadLetter], acts: Acts, broker: Broker):
        ids = [letter.id for letter in letters]
        half = len(ids) // 2

        discarded, replayed = broker.discard("group", ids[half:]), broker.replay("group", ids[:-10])

        assert (discarded, replayed) == (set(ids[half:]), set(ids[:half]))
        assert acts.dead_letters() == []
        again = acts.receive(limit=len(ids), count=half)
        assert sorted(one.message_id for one in again) == sorted(letter.message_id for letter in letters[:half])

    @pytest.mark.needs("settles_letters_once")
    def test_are_settled_once_by_two_operators_while_a_monitor_counts(
        self, letters: list[BrokerDeadLetter], acts: Acts, harness: Harness
    ):
        begun: set[str] = set()
        done: dict[str, list[str]] = {"replay": [], "discard": []}
        is_over = threading.Event()

        def settle(name: str) -> None:
            with closing(harness.open()) as broker:
                while left := [one.id for one in broker.dead_letters("group", limit=10_000) if one.topic == letters[0].topic]:
                    for start in range(0, len(left), 100):
                        portion = left[start : start + 100]
                        begun.update(portion)
                        done[name] += getattr(broker, name)("group", portion)

        def watch() -> list[tuple[int, int, int]]:
            """Return counts, each with the least and the most that it may be."""
            seen = []
            with closing(harness.open()) as broker:
                while not is_over.is_set():
                    most = len(letters) - sum(map(len, done.values()))
                    with suppress(BrokerUnavailable):  # the operators have them
                        found = broker.count_dead_letters("group").get(letters[0].topic, 0)
                        seen.append((len(letters) - len(begun), found, most))
            return seen

        with ThreadPoolExecutor(3) as threads:
            counts = threads.submit(watch)
            try:
                for operator in [threads.submit(settle, name) for name in done]:
                    operator.result()
            finally:
                is_over.set()

        assert sorted([*done["replay"], *done["discard"]]) == sorted(letter.id for letter in letters)
        seen = counts.result()
        assert [one for one in seen if not one[0] <= one[1] <= one[2]] == []
        numbers = [number for _, number, _ in seen]
        assert numbers == sorted(numbers, reverse=True)
        assert numbers[0] > 0
        assert acts.counted("group") == {}


@pytest.mark.needs("delivers_again")
class TestDeliverAgain:
    def test_hands_a_finished_message_to_its_group_as_if_for_the_first_time(self, acts: Acts, broker: Broker):
        [message] = acts.send_bodies(b"a")
        broker.ack(acts.receive())

        found = broker.deliver_again("group", [message.message_id])

        assert found == {message.message_id}
        assert [(again.message_id, again.delivery_count) for again in acts.receive()] == [(message.message_id, 1)]

    def test_hands_it_to_no_other_group(self, acts: Acts, broker: Broker):
        [message] = acts.send_bodies(b"a")
        broker.ack([*acts.receive(), *acts.receive(group="other")])

        broker.deliver_again("group", [message.message_id])

        assert acts.receive(group="other") == []

    def test_leaves_what_the_group_still_has_before_it(self, acts: Acts, broker: Broker):
        held, waiting = acts.send_bodies(b"a")[0], "0190c1f8-0000-7000-8000-000000000000"
        acts.receive()

        assert broker.deliver_again("group", [held.message_id, waiting]) == set()

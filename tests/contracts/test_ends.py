"""Ends of half messages: the first, repeated ones, what an accepted one is worth, and which half message it names."""

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Broker, Ended, EndSemantics, HalfRef, SendStatus
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Resolution, TopicType
from tests.contracts.acts import HELD, NO_TIME, Acts
from tests.contracts.harness import Harness
from tests.waiting import run_at_once

HALF = TopicType.TRANSACTION

# How many copies a first and a second end may make together.
COPIES = {
    EndSemantics.IDEMPOTENT: {(COMMIT, COMMIT): 1, (COMMIT, ROLLBACK): 1, (ROLLBACK, COMMIT): 0, (ROLLBACK, ROLLBACK): 0},
    EndSemantics.STATELESS: {(COMMIT, COMMIT): 2, (COMMIT, ROLLBACK): 1, (ROLLBACK, COMMIT): 1, (ROLLBACK, ROLLBACK): 0},
}

pytestmark = pytest.mark.needs("HalfMessages")


class TestEnd:
    @pytest.mark.needs("remembers_ends")
    def test_answers_in_the_order_of_the_halves(self, acts: Acts):
        halves = acts.send_halves(*[acts.message(HALF) for _ in range(5)])
        acts.end(halves[3], resolution=ROLLBACK)

        ended = acts.end(halves[4], halves[3], halves[0])

        assert ended == [Ended.COMMITTED, Ended.ROLLED_BACK, Ended.COMMITTED]

    def test_ends_the_half_it_names(self, acts: Acts):
        halves = acts.send_halves(*[acts.message(HALF, body=b"%d" % n) for n in range(5)])

        acts.end(halves[1], halves[4])

        assert sorted(acts.bodies(HALF)) == [b"1", b"4"]

    def test_does_not_know_a_half_that_never_was(self, acts: Acts):
        topic = acts.harness.topic(HALF)

        ended = acts.end(HalfRef(topic, "987654321", "m"), HalfRef(topic, "not ours", "m"), HalfRef(topic, "", "m"))

        assert ended == [Ended.NOT_FOUND] * 3

    def test_refuses_to_end_by_unknown(self, broker: Broker):
        with pytest.raises(ValueError, match="COMMIT or ROLLBACK"):
            broker.end([], UNKNOWN)

    def test_answers_an_empty_batch(self, broker: Broker):
        assert broker.end([], COMMIT) == []

    @pytest.mark.needs("remembers_ends")
    @pytest.mark.parametrize("first", [COMMIT, ROLLBACK])
    @pytest.mark.parametrize("second", [COMMIT, ROLLBACK])
    def test_returns_the_first_outcome_to_a_second_end(self, acts: Acts, first: Resolution, second: Resolution):
        half = acts.half()
        [outcome] = acts.end(half, resolution=first)

        [again] = acts.end(half, resolution=second)

        assert again is outcome
        assert len(acts.receive(HALF)) == (1 if first is COMMIT else 0)

    @pytest.mark.needs("remembers_ends")
    def test_gives_two_that_end_at_once_the_same_outcome(self, acts: Acts, harness: Harness):
        halves = [acts.half() for _ in range(40)]

        def end_all(by: tuple[Broker, Resolution]) -> list[Ended | None]:
            broker, resolution = by
            return [outcome.ended for half in halves for outcome in broker.end([half], resolution)]

        first, second = run_at_once(end_all, (harness.open(), COMMIT), (harness.open(), ROLLBACK))

        assert first == second
        assert len(acts.receive(HALF)) == first.count(Ended.COMMITTED)


class TestRepeatedEnd:
    """A second end makes as many copies as `end_semantics` says, at most."""

    @pytest.mark.parametrize("first", [COMMIT, ROLLBACK])
    @pytest.mark.parametrize("second", [COMMIT, ROLLBACK])
    def test_adds_no_more_copies_than_said(self, acts: Acts, broker: Broker, first: Resolution, second: Resolution):
        half = acts.half()

        acts.end(half, resolution=first)
        acts.end(half, resolution=second)

        least = 1 if first is COMMIT else 0
        assert least <= len(acts.receive(HALF, count=least)) <= COPIES[broker.end_semantics][first, second]

    def test_may_name_one_half_twice_in_a_call(self, acts: Acts, broker: Broker):
        half = acts.half()

        acts.end(half, half)

        assert 1 <= len(acts.receive(HALF, count=1)) <= COPIES[broker.end_semantics][COMMIT, COMMIT]


class TestConfirmedEnd:
    def test_is_what_the_broker_says_it_is(self, broker: Broker, harness: Harness):
        assert broker.confirms_ends is harness.confirms_ends

    @pytest.mark.needs("confirms_ends")
    def test_is_visible_at_once_to_another_process(self, acts: Acts, broker: Broker, harness: Harness):
        [other] = broker.end(acts.send_halves(acts.message(HALF, body=b"a")), COMMIT)
        broker.close()

        assert (other.status, other.ended) == (SendStatus.ACCEPTED, Ended.COMMITTED)
        topics = [harness.topic(HALF)]
        found = harness.open().receive("group", topics, limit=10, invisible_for=HELD, wait=NO_TIME)
        assert [delivery.body for delivery in found] == [b"a"]


@pytest.mark.needs("places_halves")
class TestPlace:
    def test_is_another_for_each_half_message(self, acts: Acts):
        halves = acts.send_halves(*[acts.message(HALF) for _ in range(3)])

        assert len({half.place for half in halves} - {""}) == 3

    def test_need_not_be_known(self, acts: Acts):
        assert acts.end(replace(acts.half(), place="")) == [Ended.COMMITTED]

    def test_of_another_half_message_ends_neither(self, acts: Acts):
        one, other = acts.send_halves(acts.message(HALF), acts.message(HALF))

        ended = acts.end(replace(one, place=other.place))

        assert ended == [Ended.NOT_FOUND]
        assert acts.receive(HALF) == []

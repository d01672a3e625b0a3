"""Where half messages stand: after ends whose answers were lost, that never arrived or that came too late."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Broker, Ended, EndSemantics, HalfRef, HalfStatus, SendStatus
from outbox.message import COMMIT, ROLLBACK, Resolution, TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import Harness

HALF = TopicType.TRANSACTION
NEITHER = (HalfStatus.GONE, HalfStatus.UNPROVEN)

pytestmark = pytest.mark.needs("HalfMessages")


class TestLookUp:
    def test_answers_in_the_order_of_the_halves(self, acts: Acts, broker: Broker):
        hidden, committed, lost = acts.decided_half(), acts.decided_half(), acts.unknown_half()
        acts.end(committed)
        assert acts.look_up(committed) is HalfStatus.VISIBLE  # by now a server that is late tells all of them
        assert acts.look_up(lost) in NEITHER

        standings = broker.look_up_halves([lost, committed, hidden, lost])

        assert standings[1:3] == [HalfStatus.VISIBLE, HalfStatus.HIDDEN]
        assert standings[0] is standings[3]
        assert standings[0] in NEITHER

    def test_answers_an_empty_batch(self, broker: Broker):
        assert broker.look_up_halves([]) == []

    def test_changes_nothing(self, acts: Acts):
        half = acts.decided_half()

        assert [acts.look_up(half) for _ in range(3)] == [HalfStatus.HIDDEN] * 3

        assert acts.receive(HALF) == []
        assert acts.end(half) == [Ended.COMMITTED]

    def test_needs_no_place(self, acts: Acts):
        hidden, committed = acts.decided_half(), acts.decided_half()
        acts.end(committed)

        assert acts.look_up(replace(hidden, place="")) is HalfStatus.HIDDEN
        assert acts.look_up(replace(committed, place="")) is HalfStatus.VISIBLE

    def test_of_a_half_that_never_was_finds_neither(self, acts: Acts):
        assert acts.look_up(acts.unknown_half()) in NEITHER

    def test_of_a_half_that_never_was_proves_nothing_where_its_age_is_not_known(self, acts: Acts):
        assert acts.look_up(replace(acts.unknown_half(), decided_at=None)) in NEITHER

    def test_is_not_misled_by_another_half_in_its_place(self, acts: Acts):
        other = acts.half()

        assert acts.look_up(acts.unknown_half(place=other.place)) in NEITHER

        assert acts.look_up(acts.decide(other)) is HalfStatus.HIDDEN

    def test_is_not_misled_by_another_message(self, acts: Acts):
        acts.end(acts.half())

        assert acts.look_up(acts.unknown_half()) in NEITHER

    def test_tells_what_can_still_be_committed_behind_a_rollback(self, acts: Acts, broker: Broker):
        half = acts.decided_half()
        acts.end(half, resolution=ROLLBACK)

        standing = acts.look_up(half)

        is_stateless = broker.end_semantics is EndSemantics.STATELESS
        assert standing is (HalfStatus.HIDDEN if is_stateless else HalfStatus.GONE)
        assert len(acts.receive(HALF)) == 0
        acts.end(half)
        assert len(acts.receive(HALF, count=1 if is_stateless else 0)) == (1 if is_stateless else 0)

    def test_knows_nothing_while_the_server_is_away(self, acts: Acts, harness: Harness):
        halves = [acts.decided_half(), acts.unknown_half()]
        away = harness.open_unreachable()

        assert away.look_up_halves(halves) == [HalfStatus.UNKNOWN] * 2


@pytest.mark.needs("can_lose_ends")
class TestEndWithoutAnswer:
    def end_unheard(self, acts: Acts, half: HalfRef, resolution: Resolution, *, arrive: bool) -> SendStatus:
        with acts.harness.lose_ends(acts.broker, arrive=arrive):
            [result] = acts.broker.end([half], resolution)
        return result.status

    def test_is_seen_to_have_taken_effect(self, acts: Acts):
        half = acts.decided_half()

        status = self.end_unheard(acts, half, COMMIT, arrive=True)

        assert status is SendStatus.UNSURE
        assert acts.look_up(half) is HalfStatus.VISIBLE
        assert len(acts.receive(HALF, count=1)) == 1

    def test_is_done_later_where_it_never_arrived(self, acts: Acts):
        half = acts.decided_half()

        status = self.end_unheard(acts, half, COMMIT, arrive=False)

        assert status in (SendStatus.UNSURE, SendStatus.UNAVAILABLE)
        assert acts.look_up(half) is HalfStatus.HIDDEN
        assert acts.receive(HALF) == []
        assert acts.end(half) == [Ended.COMMITTED]
        assert acts.look_up(half) is HalfStatus.VISIBLE
        assert len(acts.receive(HALF, count=1)) == 1

    def test_does_not_make_a_message_visible_that_was_rolled_back(self, acts: Acts):
        half = acts.decided_half()

        status = self.end_unheard(acts, half, ROLLBACK, arrive=True)

        assert status is SendStatus.UNSURE
        assert acts.look_up(half) is not HalfStatus.VISIBLE
        assert acts.receive(HALF) == []

    def test_says_nothing_of_other_halves(self, acts: Acts):
        unheard, hidden, committed = (acts.decided_half() for _ in range(3))
        acts.end(committed)

        self.end_unheard(acts, unheard, COMMIT, arrive=True)

        assert [acts.look_up(half) for half in (hidden, committed)] == [HalfStatus.HIDDEN, HalfStatus.VISIBLE]

    @pytest.mark.needs("remembers_ends")
    @pytest.mark.parametrize("arrive", [True, False])
    def test_may_be_repeated_where_ends_are_remembered(self, acts: Acts, arrive: bool):
        half = acts.decided_half()
        self.end_unheard(acts, half, COMMIT, arrive=arrive)

        assert acts.end(half, half) == [Ended.COMMITTED] * 2

        assert len(acts.receive(HALF)) == 1


class TestEndWithin:
    def test_leaves_nothing_under_way_when_its_time_is_over(self, acts: Acts, broker: Broker):
        half = acts.decided_half()

        [result] = broker.end([half], COMMIT, within=timedelta(0))

        is_done = result.status is SendStatus.ACCEPTED
        assert is_done or result.status is SendStatus.UNAVAILABLE
        assert acts.look_up(half) is (HalfStatus.VISIBLE if is_done else HalfStatus.HIDDEN)

    def test_may_be_asked_for_again(self, acts: Acts, broker: Broker):
        half = acts.decided_half()
        broker.end([half], COMMIT, within=timedelta(seconds=-1))
        if acts.look_up(half) is HalfStatus.HIDDEN:
            acts.end(half)

        assert acts.look_up(half) is HalfStatus.VISIBLE
        assert len(acts.receive(HALF, count=1)) == 1

    def test_ends_as_ever_before(self, acts: Acts, broker: Broker):
        one, other = acts.half(), acts.half()

        [committed] = broker.end([one], COMMIT, within=timedelta(minutes=5))
        [rolled_back] = broker.end([other], ROLLBACK, within=timedelta(minutes=5))

        assert (committed.ended, rolled_back.ended) == (Ended.COMMITTED, Ended.ROLLED_BACK)
        assert [delivery.message_id for delivery in acts.receive(HALF, count=1)] == [one.message_id]

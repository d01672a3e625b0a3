"""Which proxy or broker is left alone, and how long. Needs no server."""

import pytest

from outbox.brokers.rocketmq.fault_strategy import FaultStrategy
from tests.clock import Clock

A, B, C = "broker-a", "broker-b", "broker-c"


@pytest.fixture
def avoidance(clock: Clock) -> FaultStrategy:
    return FaultStrategy(clock, random=lambda: 0.5)


class TestChoose:
    def test_takes_them_in_their_turn(self, avoidance: FaultStrategy):
        assert [avoidance.choose(turn) for turn in ([A, B], [B, A], [A, B])] == [A, B, A]

    def test_leaves_alone_one_that_failed_for_a_while(self, avoidance: FaultStrategy, clock: Clock):
        avoidance.record_failure(A)

        assert avoidance.choose([A, B]) == B
        clock.now += 9.9
        assert avoidance.choose([A, B]) == B
        clock.now += 0.2
        assert avoidance.choose([A, B]) == A

    @pytest.mark.parametrize(("took", "seconds"), [(0.5, 0), (0.6, 2), (2.0, 5), (3.5, 6), (6.0, 10), (20.0, 30)])
    def test_leaves_alone_one_that_was_slow_the_longer_the_slower(
        self, avoidance: FaultStrategy, clock: Clock, took: float, seconds: float
    ):
        avoidance.record_answer(A, took)

        clock.now += seconds - 0.1
        assert avoidance.choose([A, B]) == (B if seconds else A)
        clock.now += 0.2
        assert avoidance.choose([A, B]) == A

    def test_takes_one_again_that_answered_quickly(self, avoidance: FaultStrategy):
        avoidance.record_failure(A)
        avoidance.record_answer(A, 0.01)

        assert avoidance.choose([A, B]) == A

    def test_takes_the_one_that_is_free_soonest_where_all_have_failed(self, avoidance: FaultStrategy):
        avoidance.record_answer(A, 6.0)
        avoidance.record_answer(B, 2.0)
        avoidance.record_flow_control(C)

        assert avoidance.choose([A, B, C]) == C


class TestFlowControl:
    def test_waits_longer_each_time_it_is_said_again(self, avoidance: FaultStrategy, clock: Clock):
        waits = []
        for _ in range(14):
            waits.append(avoidance.record_flow_control(A))
            clock.now += waits[-1] + 0.01

        assert waits[:3] == pytest.approx([1.0, 1.6, 2.56])
        assert set(waits[3:]) == {3.0}

    @pytest.mark.parametrize(("random", "wait"), [(0.0, 0.8), (1.0, 1.2)])
    def test_spreads_the_waits(self, clock: Clock, random: float, wait: float):
        assert FaultStrategy(clock, random=lambda: random).record_flow_control(A) == pytest.approx(wait)

    def test_counts_once_what_is_said_to_requests_that_were_under_way(self, avoidance: FaultStrategy):
        assert [avoidance.record_flow_control(A) for _ in range(32)] == [1.0] + [0.0] * 31
        assert avoidance.backoff_seconds(A) == pytest.approx(1.0)

    def test_is_not_over_by_an_answer_to_a_request_that_was_under_way(self, avoidance: FaultStrategy, clock: Clock):
        avoidance.record_flow_control(A)

        avoidance.record_answer(A, 0.01)

        assert avoidance.backoff_seconds(A) > 0

    def test_is_forgotten_when_a_message_is_taken_again(self, avoidance: FaultStrategy, clock: Clock):
        avoidance.record_flow_control(A)
        clock.now += 1.1
        avoidance.record_answer(A, 0.01)

        assert avoidance.record_flow_control(A) == 1.0

    def test_concerns_one_server(self, avoidance: FaultStrategy):
        avoidance.record_flow_control(A)

        assert avoidance.backoff_seconds(B) == 0

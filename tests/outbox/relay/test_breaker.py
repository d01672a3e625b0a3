from datetime import timedelta

import pytest

from outbox.relay.backoff import Backoff
from outbox.relay.breaker import Breaker, BreakerState


@pytest.fixture
def breaker(clock) -> Breaker:
    return Breaker(3, Backoff(timedelta(seconds=1), timedelta(seconds=30), lambda: 1.0), clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.note_unavailable()


class TestBreaker:
    def test_opens_after_some_failures_in_a_row(self, breaker):
        fail(breaker, 2)
        assert breaker.state is BreakerState.CLOSED

        assert breaker.note_unavailable()

        assert breaker.state is BreakerState.OPEN

    def test_counts_only_failures_in_a_row(self, breaker):
        fail(breaker, 2)

        breaker.note_answer()
        fail(breaker, 2)

        assert breaker.state is BreakerState.CLOSED

    def test_lets_a_probe_pass_when_its_wait_is_over(self, breaker, clock):
        fail(breaker, 3)
        assert breaker.seconds_left == 1

        clock.now += 1

        assert breaker.state is BreakerState.HALF_OPEN
        assert breaker.seconds_left == 0

    def test_waits_twice_as_long_after_each_probe_that_failed(self, breaker, clock):
        fail(breaker, 3)
        clock.now += 1

        fail(breaker, 1)

        assert breaker.state is BreakerState.OPEN
        assert breaker.seconds_left == 2

    def test_closes_when_the_broker_answers(self, breaker, clock):
        fail(breaker, 3)
        clock.now += 1

        breaker.note_answer()

        assert breaker.state is BreakerState.CLOSED
        fail(breaker, 3)
        assert breaker.seconds_left == 1

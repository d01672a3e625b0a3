from datetime import timedelta

import pytest

from outbox.outages import Backoff
from outbox.relay.breaker import Breaker, Breakers, BreakerState, Budget
from tests.outbox.relay.outages import open_for


@pytest.fixture
def breaker(clock) -> Breaker:
    return Breaker(3, Backoff(timedelta(seconds=1), timedelta(seconds=30), lambda: 1.0), clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.record_no_answer()


class TestBreaker:
    def test_opens_after_some_failures_in_a_row(self, breaker):
        fail(breaker, 2)
        assert breaker.state is BreakerState.CLOSED

        assert breaker.record_no_answer()

        assert breaker.state is BreakerState.OPEN

    def test_counts_only_failures_in_a_row(self, breaker):
        fail(breaker, 2)

        breaker.record_answer()
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

        breaker.record_answer()

        assert breaker.state is BreakerState.CLOSED
        fail(breaker, 3)
        assert breaker.seconds_left == 1


@pytest.fixture
def breakers(clock) -> Breakers:
    return Breakers(lambda: Breaker(3, Backoff(timedelta(seconds=1), timedelta(seconds=30), lambda: 1.0), clock))


class TestBreakers:
    def test_leave_one_topic_alone_that_gets_no_answer(self, breakers):
        open_for(breakers, "orders")

        assert breakers.open_topics == ["orders"]
        assert breakers.state is BreakerState.CLOSED

    def test_know_that_the_broker_is_away_by_several_topics(self, breakers):
        open_for(breakers, "orders", "parcels", "bills")

        assert breakers.state is BreakerState.OPEN
        assert breakers.seconds_left == 1

    def test_do_not_take_topics_for_the_broker_where_another_one_is_answered(self, breakers):
        open_for(breakers, "orders", "parcels")
        breakers.record_answer("mails")

        open_for(breakers, "bills")

        assert breakers.state is BreakerState.CLOSED
        assert sorted(breakers.open_topics) == ["bills", "orders", "parcels"]

    def test_double_the_wait_of_a_broker_whose_probe_failed(self, breakers, clock):
        open_for(breakers, "orders", "parcels", "bills")
        clock.now += 1

        breakers.record_no_answer("orders")

        assert breakers.seconds_left == 2

    def test_probe_all_topics_at_once_when_the_broker_is_back(self, breakers, clock):
        open_for(breakers, "orders", "parcels", "bills")
        for _ in range(3):
            clock.now += 100
            breakers.record_no_answer("parcels")

        breakers.record_answer("orders")

        assert breakers.state is BreakerState.CLOSED
        assert breakers.open_topics == []
        assert breakers.is_probed("bills")
        assert breakers.is_probed("parcels")

    def test_claim_a_topic_again_when_its_wait_is_over(self, breakers, clock):
        open_for(breakers, "orders")
        clock.now += 2
        open_for(breakers, "parcels")

        assert breakers.open_topics == ["parcels"]
        assert breakers.is_probed("orders")

    def test_name_a_topic_until_it_is_answered(self, breakers, clock):
        """An alert that waits for half a minute would never fire if each probe took the topic off the list."""
        open_for(breakers, "orders")
        clock.now += 2

        assert breakers.describe() == "open for orders"
        breakers.record_answer("orders")
        assert breakers.describe() == "closed"

    def test_forget_a_topic_that_has_nothing_to_send(self, breakers, clock):
        open_for(breakers, "orders")
        clock.now += 100

        assert breakers.describe() == "closed"

    def test_open_the_brokers_once_however_many_topics_get_no_answer_at_once(self, breakers):
        open_for(breakers, *(f"orders-{number}" for number in range(16)))

        assert breakers.seconds_left == 1

    def test_open_the_brokers_again_when_its_probe_was_of_a_topic_that_had_not_failed(self, breakers, clock):
        open_for(breakers, "orders", "parcels", "bills")
        clock.now += 1

        assert breakers.record_no_answer("mails") == 2
        assert breakers.state is BreakerState.OPEN

    def test_name_some_of_the_topics_that_get_no_answer(self, breakers):
        assert breakers.describe() == "closed"

        for name in ("orders", "parcels", "bills", "mails", "stock"):
            open_for(breakers, name)
            breakers.record_answer("calls")

        assert breakers.describe() == "open for bills, mails, orders and 2 more"


class TestBudget:
    @pytest.mark.parametrize(
        ("size", "seconds", "expected"),
        [(1000, 2.1, 500), (400, 2.1, 200), (100, 2.1, 100), (1000, 1, 1000), (600, 0.1, 2000), (400, 0.1, 1000)],
        ids=["slow", "slow-before-it-was-full", "least", "neither", "fast", "fast-and-not-full"],
    )
    def test_follows_the_time_of_a_call(self, monkeypatch, size, seconds, expected):
        monkeypatch.setattr(Budget, "MIN_SIZE", 100)
        budget = Budget(1000)

        budget.adapt(size, seconds)

        assert budget.size == expected

    def test_has_an_end(self):
        budget = Budget()

        for _ in range(10):
            budget.adapt(budget.size, 0.1)

        assert budget.size == Budget.MAX_SIZE

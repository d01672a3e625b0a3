from datetime import timedelta

import pytest

from outbox import RetryPolicy
from outbox.testing.factories import FailedDeliveryFactory
from tests.outbox.publishing.rows import OrderMade, ReminderSet
from tests.outbox.testing.orders import ORDER, commit

pytestmark = pytest.mark.usefixtures("own_topics")


class TestAdvance:
    def test_lets_a_delay_pass(self, outbox, handled):
        seen = handled(OrderMade)
        commit(delay=timedelta(hours=1))
        outbox.run_until_idle()
        outbox.advance(timedelta(minutes=59))
        outbox.run_until_idle()
        assert seen == []

        outbox.advance(timedelta(minutes=1))
        outbox.run_until_idle()

        assert seen == [ORDER]

    @pytest.mark.parametrize("is_sent_before", [True, False])
    def test_lets_a_delay_of_the_broker_pass(self, outbox, handled, is_sent_before):
        seen = handled(ReminderSet)
        commit(ReminderSet(text="!"), delay=timedelta(minutes=10))
        if is_sent_before:
            outbox.run_until_idle()
        outbox.advance(timedelta(minutes=9))
        outbox.run_until_idle()
        assert seen == []

        outbox.advance(timedelta(minutes=1))
        outbox.run_until_idle()

        assert seen == [ReminderSet(text="!")]

    def test_lets_each_retry_come_exactly_when_it_is_due(self, outbox, handled):
        runs = []

        def fail(order):
            runs.append(order)
            raise RuntimeError

        handled(OrderMade, fail, retry=RetryPolicy(delays=[timedelta(seconds=10), timedelta(minutes=1)]))
        commit()
        outbox.run_until_idle(raise_errors=False)

        made = []
        for seconds in (9, 1, 59, 1):
            outbox.advance(timedelta(seconds=seconds))
            outbox.run_until_idle(raise_errors=False)
            made.append(len(runs))

        assert made == [1, 2, 2, 3]

    def test_lets_the_relays_back_off_and_breaker_pass(self, outbox, handled):
        seen = handled(OrderMade)
        outbox.broker.fail("send_halves", "unavailable", times=3)
        commit()
        outbox.run_until_idle()
        assert seen == []

        outbox.advance(timedelta(seconds=1))
        outbox.run_until_idle()

        assert seen == [ORDER]

    def test_makes_each_row_older_once(self, outbox):
        failed = FailedDeliveryFactory()
        failed.refresh_from_db()
        failed_at = failed.failed_at

        outbox.advance(timedelta(hours=1))

        failed.refresh_from_db()
        assert failed_at - failed.failed_at == timedelta(hours=1)

    def test_lets_a_idempotency_key_expire(self, outbox):
        commit(idempotency_key="once")
        commit(idempotency_key="once")
        outbox.assert_published(OrderMade, times=1)

        outbox.advance(timedelta(days=7))
        commit(idempotency_key="once")

        outbox.assert_published(OrderMade, times=2)

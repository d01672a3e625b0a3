"""Lost answers, and requests that arrive twice."""

from functools import partial

import pytest

from outbox.brokers.base import Ended, SendStatus
from outbox.models import Batch, State, Ticket
from tests.outbox.relay.committing import ended
from tests.outbox.relay.faults.recovery import ask_about_halves, copies, is_free
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


class TestLostAnswers:
    def test_of_a_claim_leave_the_batch_to_the_next_relay(self, start, broker, wait):
        messages = wait("normal")
        unlucky = start()
        unlucky.claims.claim()

        unlucky.connection.close()
        wait_until(partial(is_free, unlucky.lane))
        start().drain()

        assert copies(broker, messages) == [1, 1]
        assert not Ticket.objects.exists()

    def test_of_half_messages_that_never_arrived_send_them_again(self, start, broker, wait):
        messages = wait()
        broker.fail("send_halves", SendStatus.UNSURE, times=2)

        start().drain()

        assert copies(broker, messages) == [1, 1]
        assert len(broker.halves()) == 2

    def test_of_half_messages_that_did_arrive_send_them_again_under_a_new_token(self, start, broker, wait):
        messages = wait()
        broker.fail("send_halves", SendStatus.UNSURE, times=1, stored=True)

        start().drain()
        ask_about_halves(broker)

        assert copies(broker, messages) == [1, 1]
        assert sorted(ended(broker)) == [Ended.COMMITTED, Ended.COMMITTED, Ended.ROLLED_BACK]

    @pytest.mark.parametrize("is_stored", [False, True])
    def test_of_commits_are_asked_for_again(self, start, broker, wait, is_stored):
        messages = wait()
        broker.fail("end", SendStatus.UNSURE, times=2, stored=is_stored)
        relay = start()

        relay.drain()
        assert Batch.objects.get().state == State.PREPARED
        relay.sweep()

        assert copies(broker, messages) == [1, 1]
        assert Batch.objects.get().state == State.SENT


class TestRepeats:
    def test_of_a_half_message_by_the_transport_show_one(self, start, broker, wait):
        """Two halves under one token; the row says which one was decided."""
        messages = wait()
        broker.duplicate("send_halves", times=None)

        start().drain()
        assert len(broker.halves()) == 4
        ask_about_halves(broker)

        assert copies(broker, messages) == [1, 1]

    def test_of_a_commit_by_the_transport_show_one(self, start, broker, wait):
        messages = wait()
        broker.duplicate("end", times=None)

        start().drain()

        assert copies(broker, messages) == [1, 1]

    def test_of_a_commit_under_way_since_before_the_first_check_show_one(self, start, broker, wait):
        messages = wait()
        broker.fail("end", SendStatus.UNSURE, times=2, late=True)

        start().drain()
        ask_about_halves(broker)
        broker.deliver_late()

        assert copies(broker, messages) == [1, 1]

"""A relay dies between two steps."""

import pytest

from outbox.brokers.base import Ended
from outbox.models import Batch, State
from tests.factories import MessageRowFactory, TicketFactory
from tests.outbox.relay.committing import ended
from tests.outbox.relay.faults.recovery import ask_about_halves, copies

pytestmark = pytest.mark.django_db(transaction=True)


class TestCrash:
    @pytest.mark.parametrize("kind", ["normal", "transaction", "fifo"])
    def test_after_the_claim_loses_nothing(self, crash_at, start, broker, make_topic, kind):
        topic = make_topic(kind)
        message = MessageRowFactory(topic=topic, key="k")
        TicketFactory(topic=topic, message=message, order_key=1 if kind == "fifo" else None)

        crash_at("relay.after_claim")
        start().drain()

        assert broker.copies(str(message.id)) == 1

    def test_with_the_half_message_stored_leaves_it_to_be_rolled_back(self, crash_at, start, broker, wait):
        messages = wait()

        crash_at("relay.after_half")
        start().drain()
        ask_about_halves(broker)

        assert copies(broker, messages) == [1, 1]
        assert ended(broker) == [Ended.ROLLED_BACK] * 2 + [Ended.COMMITTED] * 2

    def test_after_the_decision_leaves_the_commit_to_the_sweep(self, crash_at, start, broker, wait):
        messages = wait()

        crash_at("relay.after_decide")
        assert start().drain().batches == 0  # what is decided is never claimed again
        start().sweep()

        assert copies(broker, messages) == [1, 1]
        assert len(broker.halves()) == 2

    def test_after_the_decision_leaves_the_commit_to_the_check_back(self, crash_at, broker, wait):
        messages = wait()

        crash_at("relay.after_decide")
        ask_about_halves(broker)

        assert copies(broker, messages) == [1, 1]

    def test_after_the_commit_shows_nothing_twice(self, crash_at, start, broker, wait):
        messages = wait()

        crash_at("relay.after_commit")
        start().sweep()

        assert copies(broker, messages) == [1, 1]
        assert Batch.objects.get().state == State.SENT

    def test_between_send_and_mark_shows_whole_messages_twice(self, crash_at, start, broker, wait):
        """The only thing to rely on is a broker that drops repeats."""
        messages = wait("normal")

        crash_at("relay.after_send")
        start().drain()

        assert copies(broker, messages) == [2, 2]

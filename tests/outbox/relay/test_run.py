"""The relay as its hosts see it."""

from __future__ import annotations

import pytest

from outbox.models import Batch, State, Ticket
from tests.factories import MessageRowFactory, TicketFactory

pytestmark = pytest.mark.django_db


class TestDrain:
    def test_sends_whole_messages_of_a_normal_topic(self, relay, broker, make_topic):
        topic = make_topic()
        tickets = TicketFactory.create_batch(3, topic=topic)

        drained = relay.drain()

        assert drained.sent == 3
        assert [message.message_id for message in broker.visible(topic.name)] == [str(t.message_id) for t in tickets]
        assert Batch.objects.get().state == State.SENT
        assert not Ticket.objects.exists()

    def test_commits_half_messages_of_a_transaction_topic(self, relay, broker, make_topic):
        topic = make_topic("transaction")
        TicketFactory.create_batch(3, topic=topic)

        drained = relay.drain()

        assert drained.sent == 3
        assert len(broker.halves()) == len(broker.visible(topic.name)) == 3
        assert Batch.objects.get().state == State.SENT

    def test_sends_ordered_topics(self, relay, broker, make_topic):
        topic = make_topic("fifo")
        for key in (1, 1, 2):
            TicketFactory(topic=topic, order_key=key, message=MessageRowFactory(topic=topic, key=str(key)))

        assert relay.drain().sent == 3

"""What a handler publishes: it names its cause, and goes the way of the handler's transaction."""

import json

import pytest

from outbox import consumer, publish
from outbox.consuming.handle import handle
from outbox.consuming.register import group
from outbox.message import Header
from outbox.models import Inbox, MessageRow, Ticket
from tests.outbox.consuming.deliveries import delivery
from tests.outbox.consuming.messages import Cancelled, Placed

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _cancels_at_once() -> None:
    @consumer(Placed, group="cart")
    def cancel(message, context):
        publish(Cancelled(message.invoice))
        if message.invoice == "bad":
            raise ValueError("after it published")


class TestChain:
    def test_carries_causation_and_correlation(self):
        arrived = delivery(Placed("A1"), headers={Header.CORRELATION_ID: "story"})

        handle(group("cart"), arrived)

        headers = json.loads(MessageRow.objects.get().headers)
        assert headers[Header.CAUSATION_ID] == arrived.message_id
        assert headers[Header.CORRELATION_ID] == "story"
        assert Ticket.objects.count() == Inbox.objects.count() == 1

    def test_is_rolled_back_with_the_handler(self):
        handle(group("cart"), delivery(Placed("bad")))

        assert not MessageRow.objects.exists()
        assert not Ticket.objects.exists()

    def test_is_published_once_though_the_message_came_twice(self):
        arrived = delivery(Placed("A1"))

        for _ in range(2):
            handle(group("cart"), arrived)

        assert MessageRow.objects.count() == 1

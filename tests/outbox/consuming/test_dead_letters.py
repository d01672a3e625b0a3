from dataclasses import replace
from datetime import timedelta

import pytest

from outbox import consumer
from outbox.brokers.base import Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.consuming.dead_letters import NO_RECORD, read_letters
from outbox.models import FailedDelivery
from tests.factories import message_id
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db


@pytest.fixture
def given_up(broker, monkeypatch):
    """A message that a group gave up, at a broker that keeps no reasons."""
    consumer(Placed, group="cart")(lambda message, context: None)
    broker.send([Outgoing(str(message_id()), "orders", b"{}")])
    minute, now = timedelta(minutes=1), timedelta(0)
    [delivery] = broker.receive("cart", {"orders": None}, limit=1, invisible_for=minute, wait=now)
    broker.dead_letter(delivery, "of no use")
    listed = MemoryBroker.dead_letters

    def without_reasons(broker, group, **options):
        return [replace(letter, reason="") for letter in listed(broker, group, **options)]

    monkeypatch.setattr(MemoryBroker, "dead_letters", without_reasons)
    return delivery


def failed(delivery, *, delivery_count, **fields):
    """A delivery that failed."""
    row = {"consumer_group": "cart", "message_id": delivery.message_id, "topic": "orders", "outcome": "retry"} | fields
    FailedDelivery.objects.create(
        delivery_count=delivery_count, error=f"ValueError: number {delivery_count}", fingerprint="", **row
    )


class TestReadLetters:
    def test_takes_the_reason_from_the_last_failure_where_the_broker_keeps_none(self, given_up):
        failed(given_up, delivery_count=1)
        failed(given_up, delivery_count=2, outcome="dead letter")
        failed(given_up, delivery_count=3, consumer_group="points")
        failed(given_up, delivery_count=4, topic="bills")

        [found] = read_letters().found

        assert (found.letter.reason, found.letter.delivery_count) == ("delivery 2: ValueError: number 2", 2)

    def test_says_where_the_broker_has_given_it_up_by_itself(self, given_up):
        failed(given_up, delivery_count=2)

        [found] = read_letters().found

        assert found.letter.reason == "given up by the broker itself, after its own limit; last: delivery 2: ValueError: number 2"

    def test_says_where_there_is_no_record_of_a_failure(self, given_up):
        [found] = read_letters().found

        assert found.letter.reason == NO_RECORD

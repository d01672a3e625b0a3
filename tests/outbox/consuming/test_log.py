"""What the log says of runs that failed: each in a line, and a traceback where it says something new."""

from datetime import timedelta

import pytest

from outbox import Reject, RetryLater, RetryPolicy, consumer
from outbox.consuming import failures
from outbox.consuming.handle import handle
from outbox.consuming.register import group
from outbox.models import FailedDelivery
from tests.outbox.consuming.deliveries import delivery, end_delays, run_due
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _met_none(monkeypatch):
    monkeypatch.setattr(failures, "_seen_errors", {})


@pytest.fixture
def records(caplog):
    """Run a handler that raises at each of some deliveries; return what was logged of them."""

    def records(error, *, deliveries):
        @consumer(Placed, group="cart", retry=RetryPolicy(limit=2, delays=[timedelta(seconds=30)], jitter=0))
        def clear_cart(message, context):
            raise error

        message = delivery(Placed("A1"), named="0b2504e0-4f89-11d3-9a0c-0305e82c3309")
        handle(group("cart"), message)
        for _ in range(1, deliveries):
            end_delays()
            run_due()
        return caplog.records

    return records


class TestTheLog:
    def test_shows_a_traceback_at_the_first_failure_and_at_the_last(self, records):
        found = records(ValueError("order 17 is odd"), deliveries=3)

        assert [(record.levelname, bool(record.exc_info)) for record in found] == [
            ("WARNING", True),
            ("ERROR", True),
        ]

    def test_carries_message_topic_and_group_as_fields(self, records):
        found = records(ValueError("order 17 is odd"), deliveries=3)

        assert [(one.outbox_message_id, one.outbox_topic, one.outbox_group, one.outbox_delivery_count) for one in found] == [
            ("0b2504e0-4f89-11d3-9a0c-0305e82c3309", "orders", "cart", delivery_count) for delivery_count in (1, 3)
        ]

    def test_says_what_happened_in_each_line_and_the_same_only_once(self, records):
        found = records(ValueError("order 17 is odd"), deliveries=3)

        named = "Message 0b2504e0-4f89-11d3-9a0c-0305e82c3309 on topic 'orders', delivery {} to group 'cart': "
        assert [record.getMessage() for record in found] == [
            named.format(1) + "retry in 30.0 s. ValueError: order 17 is odd",
            named.format(3) + "dead letter. ValueError: order 17 is odd",
        ]

    @pytest.mark.parametrize("error", [Reject("no such order"), RetryLater(60)])
    def test_shows_none_where_the_handler_said_what_it_wants(self, records, error):
        (record,) = records(error, deliveries=1)

        assert not record.exc_info
        assert str(error) in record.getMessage()

    def test_keeps_every_traceback_in_the_database(self, records):
        records(ValueError("order 17 is odd"), deliveries=3)

        assert ["ValueError: order 17 is odd" in text for text in FailedDelivery.objects.values_list("traceback", flat=True)] == [
            True
        ] * 3

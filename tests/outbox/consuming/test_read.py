import pytest

from outbox import RetryPolicy, consumer
from outbox.consuming.handle import handle
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import group
from outbox.message import Header
from outbox.models import Deferred, FailedDelivery
from tests.outbox.consuming.deliveries import delivery, errors, run_due
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db


def takes_placed(**options):
    consumer(Placed, group="cart", **options)(lambda message, context: None)


class TestUnreadable:
    def test_body_is_a_dead_letter_at_once_that_names_the_field(self):
        takes_placed()

        result = handle(group("cart"), delivery(Placed(""), body=b'{"invoice": 5}'))

        assert result.outcome is Outcome.DEAD_LETTER
        assert "$.invoice" in errors()[0]

    @pytest.mark.parametrize("body", [b"", b"{", b"\xff"])
    def test_json_is_a_dead_letter_at_once(self, body):
        takes_placed()

        assert handle(group("cart"), delivery(Placed(""), body=body)).outcome is Outcome.DEAD_LETTER
        assert "does not fit" in errors()[0]

    def test_body_of_a_newer_version_waits_for_newer_code(self):
        takes_placed(retry=RetryPolicy(limit=0))

        result = handle(group("cart"), delivery(Placed(""), body=b'{"no": 1}', headers={Header.VERSION: "3"}))

        assert result.outcome is Outcome.DEFERRED
        assert "Deploy the newer code" in FailedDelivery.objects.get().error

    def test_type_waits_for_a_process_that_has_its_code(self):
        takes_placed(retry=RetryPolicy(limit=0))

        result = handle(group("cart"), delivery(Placed(""), headers={Header.TYPE: "OrderFrobbed"}))

        assert result.outcome is Outcome.DEFERRED
        row = Deferred.objects.get()
        assert (row.reason, row.failures) == ("no handler", 0)
        assert "'OrderFrobbed', which no module here defines" in row.error
        assert run_due() == []
        consumer(topic="orders", group="cart")(lambda message, context: None)
        assert run_due() == [Outcome.HANDLED]

    def test_type_goes_to_the_handler_of_its_topic_where_there_is_one(self):
        consumer(topic="orders", group="cart")(lambda message, context: None)

        result = handle(group("cart"), delivery(Placed(""), headers={Header.TYPE: "OrderFrobbed"}))

        assert result.outcome is Outcome.HANDLED

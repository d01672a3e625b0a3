"""Errors of millions of characters, at each door by which an error is stored."""

import pytest

from outbox import RetryPolicy, consumer, database
from outbox.batches.batch import SplitReason, Unaccepted
from outbox.check_backs.answer import answer
from outbox.check_backs.resolve import Answer
from outbox.consuming.handle import handle
from outbox.consuming.register import group
from outbox.database import heartbeats
from outbox.logs import MAX_ERROR_CHARACTERS, MAX_TRACEBACK_CHARACTERS
from outbox.message import UNKNOWN, Half
from outbox.models import CheckBack, Deferred, FailedDelivery, Process
from tests.outbox.consuming.deliveries import delivery
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db(transaction=True)

LONG = "no such order\n" * 200_000


class TestALongError:
    def test_of_a_handler_is_cut_in_its_log_and_in_the_dead_letter(self, own_definitions):
        @consumer(Placed, group="cart", retry=RetryPolicy(limit=0))
        def clear_cart(message, context):
            raise ValueError(LONG)

        handle(group("cart"), delivery(Placed("A1")))

        row = FailedDelivery.objects.get()
        assert MAX_ERROR_CHARACTERS <= len(row.error) < MAX_ERROR_CHARACTERS + 100
        assert row.error.endswith("…")
        assert len(row.traceback) <= MAX_TRACEBACK_CHARACTERS
        assert "raise ValueError" in row.traceback
        assert len(Deferred.objects.get().error) < MAX_ERROR_CHARACTERS + 100

    def test_of_a_broker_is_cut_before_a_relay_stores_it(self):
        unaccepted = Unaccepted(SplitReason.UNSURE, LONG)

        assert len(unaccepted.text) == MAX_ERROR_CHARACTERS

    def test_of_a_check_back_is_cut_in_its_row(self, monkeypatch):
        half = Half("orders", "m-1", "h-1", "source:17:1:1", asked=1)
        monkeypatch.setattr("outbox.check_backs.answer.resolve", lambda connection, half: Answer(UNKNOWN, LONG))

        answer(half, asked_by="endpoint")

        assert len(CheckBack.objects.get().reason) == MAX_ERROR_CHARACTERS

    def test_is_cut_in_a_heartbeat(self):
        heartbeats.beat(database.raw("default"), "relay", errors={"relay": LONG}, refusals={"orders": LONG})

        row = Process.objects.get()
        assert len(row.errors["relay"]) == len(row.refusals["orders"]) == MAX_ERROR_CHARACTERS

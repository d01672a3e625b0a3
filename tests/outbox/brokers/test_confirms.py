from types import SimpleNamespace

import pytest

from outbox.brokers.base import ACCEPTED, SendResult, SendStatus
from outbox.brokers.confirms import PendingConfirms

NOT_TAKEN = SendResult(SendStatus.UNAVAILABLE, reason="nack")
LATE = SendResult(SendStatus.UNSURE, reason="no answer")


def explain(error, exchange, routing_key):
    return SendResult(SendStatus.MISCONFIGURED, reason=f"{exchange} {routing_key}")


@pytest.fixture
def batch():
    """Five messages, the first of which is the seventh of its channel."""
    batch = PendingConfirms(NOT_TAKEN, explain)
    batch.first_tag = 7
    batch.extend(("orders", name) for name in "abcde")
    return batch


class TestPendingConfirms:
    def test_waits_for_all(self, batch):
        batch.on_ack(8, multiple=False)

        assert batch.pending == 4
        assert batch.finish(LATE) == [LATE, ACCEPTED, LATE, LATE, LATE]

    def test_takes_one_answer_for_all_up_to_a_number(self, batch):
        batch.on_nack(8, multiple=False)
        batch.on_ack(9, multiple=True)
        batch.on_ack(11, multiple=True)

        assert batch.pending == 0
        assert batch.finish(LATE) == [ACCEPTED, NOT_TAKEN, ACCEPTED, ACCEPTED, ACCEPTED]

    def test_does_not_take_the_confirm_of_a_message_that_came_back_for_success(self, batch):
        batch.on_return(Exception(), "orders", "paid", SimpleNamespace(properties={"message_id": "b"}))
        batch.on_ack(11, multiple=True)

        assert batch.finish(LATE)[1] == SendResult(SendStatus.MISCONFIGURED, reason="orders paid")
        assert batch.finish(LATE).count(ACCEPTED) == 4

    def test_does_not_count_what_was_not_published(self, batch):
        batch.remove_last()
        batch.extend([("orders", "f")])
        batch.on_ack(11, multiple=True)

        assert (batch.next_tag, batch.pending, len(batch.results)) == (12, 0, 5)

    def test_takes_no_answer_to_an_earlier_batch(self, batch):
        batch.on_ack(6, multiple=False)

        assert batch.results == [None] * len(batch.results)

import threading
from datetime import timedelta

import pytest
from django.db import connection, transaction

from outbox import Envelope, database, publish, publish_many
from outbox.errors import InvalidMessage
from outbox.message import Receipt
from tests.outbox.publishing.rows import OrderMade, ReminderSet, message_rows, waiting_ids
from tests.waiting import wait_until_it_blocks


@pytest.mark.usefixtures("in_transaction")
class TestAnIdempotencyKey:
    def test_gives_the_first_receipt_again(self):
        first = publish(OrderMade(order_id=7), idempotency_key="a")

        second = publish(OrderMade(order_id=8), idempotency_key="a")

        assert not first.is_duplicate
        assert second == Receipt(first.message_id, "made", "7", is_duplicate=True)
        assert waiting_ids() == [first.message_id]

    def test_takes_one_statement_more(self, django_assert_num_queries):
        publish(OrderMade(order_id=1), idempotency_key="a")

        with django_assert_num_queries(2):
            publish(OrderMade(order_id=1), idempotency_key="b")
        with django_assert_num_queries(2):
            publish(OrderMade(order_id=1), idempotency_key="b")

    def test_belongs_to_its_topic(self):
        publish(OrderMade(order_id=1), idempotency_key="a")

        other = publish(ReminderSet(text="tea"), idempotency_key="a")

        assert not other.is_duplicate

    def test_is_free_again_after_the_savepoint_was_rolled_back(self):
        with transaction.atomic():
            publish(OrderMade(order_id=1), idempotency_key="a")
            transaction.set_rollback(True)

        second = publish(OrderMade(order_id=2), idempotency_key="a")

        assert not second.is_duplicate
        assert waiting_ids() == [second.message_id]

    def test_is_free_again_after_its_time(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "IDEMPOTENCY_RETENTION": timedelta(microseconds=1)}
        publish(OrderMade(order_id=1), idempotency_key="a")
        settings.OUTBOX = {**settings.OUTBOX, "IDEMPOTENCY_RETENTION": timedelta(days=1)}

        second = publish(OrderMade(order_id=2), idempotency_key="a")
        third = publish(OrderMade(order_id=3), idempotency_key="a")

        assert not second.is_duplicate
        assert third.message_id == second.message_id

    def test_is_known_when_the_messages_day_was_dropped(self):
        first = publish(OrderMade(order_id=1), idempotency_key="a")
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM outbox_message")

        assert publish(OrderMade(order_id=1), idempotency_key="a") == Receipt(first.message_id, "made", "", is_duplicate=True)

    @pytest.mark.parametrize("idempotency_key", ["", "x" * 256, "a\nb", 7])
    def test_is_a_text_of_some_length(self, idempotency_key):
        with pytest.raises(InvalidMessage, match=r"OrderMade .*idempotency key"):
            publish(OrderMade(order_id=1), idempotency_key=idempotency_key)


@pytest.mark.usefixtures("in_transaction")
class TestIdempotencyKeysOfMany:
    def test_leave_out_what_was_published(self):
        first = publish(OrderMade(order_id=1), idempotency_key="a")

        receipts = publish_many(
            [
                Envelope(OrderMade(order_id=2), idempotency_key="b"),
                Envelope(OrderMade(order_id=3), idempotency_key="a"),
                OrderMade(order_id=4),
            ]
        )

        assert receipts[1] == Receipt(first.message_id, "made", "1", is_duplicate=True)
        assert [receipt.is_duplicate for receipt in receipts] == [False, True, False]
        assert waiting_ids() == [first.message_id, receipts[0].message_id, receipts[2].message_id]

    def test_leave_out_all_but_the_first_of_them(self):
        receipts = publish_many([Envelope(OrderMade(order_id=number), idempotency_key="a") for number in range(3)])

        first = receipts[0].message_id
        assert receipts[1:] == [Receipt(first, "made", "0", is_duplicate=True)] * 2
        assert waiting_ids() == [first]

    def test_leave_all_out(self):
        publish(OrderMade(order_id=1), idempotency_key="a")

        assert publish_many([Envelope(OrderMade(order_id=1), idempotency_key="a")])[0].is_duplicate

    def test_belong_to_their_topics(self):
        receipts = publish_many(
            [Envelope(OrderMade(order_id=1), idempotency_key="a"), Envelope(ReminderSet(text="tea"), idempotency_key="a")]
        )

        assert [receipt.is_duplicate for receipt in receipts] == [False, False]

    def test_are_texts_of_some_length(self):
        with pytest.raises(InvalidMessage, match=r"OrderMade .*idempotency key"):
            publish_many([Envelope(OrderMade(order_id=1), idempotency_key="")])


@pytest.mark.django_db(transaction=True)
class TestAConcurrentPublisher:
    @pytest.mark.parametrize("is_rolled_back", [False, True])
    def test_is_waited_for(self, is_rolled_back):
        receipts = []

        def publish_second():
            try:
                with transaction.atomic():
                    receipts.append(publish(OrderMade(order_id=2), idempotency_key="a"))
            finally:
                connection.close()

        second = threading.Thread(target=publish_second)
        with transaction.atomic():
            first = publish(OrderMade(order_id=1), idempotency_key="a")
            second.start()
            wait_until_it_blocks(database.raw("default"))
            transaction.set_rollback(is_rolled_back)
        second.join(10)

        (receipt,) = receipts
        assert receipt.is_duplicate is not is_rolled_back
        assert (receipt.message_id == first.message_id) is not is_rolled_back
        assert [row.key for row in message_rows()] == ["2" if is_rolled_back else "1"]

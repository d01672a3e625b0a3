"""An order that the broker hears of before it is written, tested as the shop's users would."""

from project.shop.messages import OrderPlaced
from project.shop.models import Order, PointsEntry, Refusal

DIRTY = {"description": "", "unit_price": "0.0"}


class TestPlaceOrderHalfFirst:
    def test_writes_the_order_and_has_it_announced(self, submit, outbox):
        answer = submit("orders/half-first", {}, DIRTY)
        outbox.run_until_idle()

        order = Order.objects.get()
        assert answer.status_code == 201
        assert answer.json()["refused"] == [{"line": 3, "reason": Refusal.objects.get().reason}]
        outbox.assert_published(OrderPlaced, invoice="536365", customer="17850", items=1, total=order.total)
        assert PointsEntry.objects.get().points == 15

    def test_rolls_back_order_and_message_when_the_payment_is_declined(self, submit, outbox):
        answer = submit("orders/half-first", payment="declined")

        assert answer.status_code == 402
        assert Refusal.objects.get().what == "payment"
        assert not Order.objects.exists()
        outbox.assert_nothing_published()
        assert outbox.pending_check_backs() == []

    def test_announces_nothing_of_an_order_without_a_good_line(self, submit, outbox):
        answer = submit("orders/half-first", DIRTY)

        assert answer.status_code == 422
        outbox.assert_nothing_published()

    def test_asks_to_come_again_while_the_broker_is_away(self, submit, outbox):
        outbox.broker.fail("send_halves", "unavailable")

        answer = submit("orders/half-first")

        assert answer.status_code == 503
        assert not Order.objects.exists()
        outbox.assert_nothing_published()

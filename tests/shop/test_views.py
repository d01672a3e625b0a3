from decimal import Decimal

import msgspec
import pytest

from outbox.models import MessageRow
from project.shop.messages import OrderCancelled, OrderPlaced
from project.shop.models import Cancellation, CancellationLine, CartEntry, Order, OrderLine, Refusal

pytestmark = pytest.mark.django_db(transaction=True)

DIRTY = {"description": "", "unit_price": "0.0"}


def published(type_):
    return [type_.from_body(bytes(row.body)) for row in MessageRow.objects.order_by("id")]


class TestPlaceOrder:
    def test_writes_the_order_and_publishes_it(self, submit):
        answer = submit("orders", {}, {"stock_code": "71053", "quantity": "1", "unit_price": "3.39"})

        order = Order.objects.get()
        assert answer.status_code == 201
        assert (order.invoice, order.customer_id, order.total) == ("536365", "17850", Decimal("18.69"))
        assert order.lines.count() == 2
        assert published(OrderPlaced) == [OrderPlaced(invoice="536365", customer="17850", items=2, total=Decimal("18.69"))]
        row = MessageRow.objects.get()
        assert (str(row.id), row.key, row.about) == (answer.json()["message_id"], "536365", f"shop.order:{order.pk}")

    def test_takes_orders_of_guests(self, submit):
        submit("orders", customer="")

        assert Order.objects.get().customer is None
        assert published(OrderPlaced)[0].customer is None

    def test_refuses_dirty_lines_and_places_the_rest(self, submit):
        answer = submit("orders", {}, DIRTY)

        refusal = Refusal.objects.get()
        assert answer.status_code == 201
        assert answer.json()["refused"] == [{"line": 3, "reason": refusal.reason}]
        assert (refusal.what, refusal.invoice, refusal.line) == ("line", "536365", 3)
        assert refusal.content["unit_price"] == "0.0"
        assert published(OrderPlaced)[0].items == 1

    def test_refuses_an_order_without_a_good_line_and_keeps_the_reasons(self, submit):
        answer = submit("orders", DIRTY)

        assert answer.status_code == 422
        assert Refusal.objects.get().what == "line"
        assert not Order.objects.exists()
        assert not MessageRow.objects.exists()

    def test_rolls_back_order_and_message_when_the_payment_is_declined(self, submit):
        answer = submit("orders", {}, DIRTY, payment="declined")

        refusal = Refusal.objects.get()
        assert answer.status_code == 402
        assert (refusal.what, refusal.invoice) == ("payment", "536365")
        assert len(refusal.content["lines"]) == 2
        assert not Order.objects.exists()
        assert not MessageRow.objects.exists()

    def test_refuses_an_order_that_it_has(self, submit):
        submit("orders")

        answer = submit("orders")

        assert answer.status_code == 409
        assert Order.objects.count() == MessageRow.objects.count() == 1
        assert Refusal.objects.get().reason == "Order 536365 was placed before."

    def test_refuses_an_order_whose_date_is_none(self, submit):
        answer = submit("orders", invoiced_at="yesterday")

        assert answer.status_code == 422
        assert Refusal.objects.get().what == "order"

    def test_says_what_does_not_fit_in_a_request(self, client):
        answer = client.post("/shop/orders/", "{}", content_type="application/json")

        assert answer.status_code == 400
        assert "missing required field `invoice`" in answer.json()["error"]

    def test_is_not_done_by_looking(self, client):
        assert client.get("/shop/orders/").status_code == 405


class TestCancelOrder:
    def test_takes_the_goods_off_the_order(self, submit):
        submit("orders", {"quantity": "6"}, {"stock_code": "71053"})

        answer = submit("cancellations", {"quantity": "-4"}, invoice="C536379")

        line = CancellationLine.objects.get()
        assert answer.status_code == 201
        assert (line.quantity, line.order_line.order.invoice, line.order_line.cancelled) == (4, "536365", 4)
        message = MessageRow.objects.get(key="C536379")
        assert OrderCancelled.from_body(bytes(message.body)) == OrderCancelled(
            invoice="C536379", customer="17850", orders=["536365"], total=Decimal("10.20")
        )

    def test_stands_against_the_customer_alone_when_no_order_holds_the_goods(self, submit):
        submit("orders", {"quantity": "6"})

        submit("cancellations", {"quantity": "-7"}, {"stock_code": "D", "quantity": "-1"}, invoice="C536379")

        cancellation = Cancellation.objects.get()
        assert [line.order_line for line in cancellation.lines.all()] == [None, None]
        assert cancellation.customer_id == "17850"
        assert OrderLine.objects.get().cancelled == 0

    def test_leaves_the_orders_of_other_customers_alone(self, submit):
        submit("orders")

        submit("cancellations", {"quantity": "-1"}, invoice="C536379", customer="13047")

        assert CancellationLine.objects.get().order_line is None

    def test_leaves_later_orders_alone(self, submit):
        submit("orders", invoiced_at="2010-12-01 10:00:00")

        submit("cancellations", {"quantity": "-1"}, invoice="C536379", invoiced_at="2010-12-01 09:00:00")

        assert CancellationLine.objects.get().order_line is None

    def test_gives_back_no_more_than_was_bought(self, submit):
        submit("orders", {"quantity": "6"})
        submit("cancellations", {"quantity": "-4"}, invoice="C536379")

        submit("cancellations", {"quantity": "-4"}, invoice="C536380")

        assert CancellationLine.objects.get(cancellation__invoice="C536380").order_line is None
        assert OrderLine.objects.get().cancelled == 4

    def test_refuses_a_cancellation_that_it_has(self, submit):
        submit("cancellations", {"quantity": "-1"}, invoice="C536379")

        answer = submit("cancellations", {"quantity": "-1"}, invoice="C536379")

        assert answer.status_code == 409
        assert Cancellation.objects.count() == MessageRow.objects.count() == 1


class TestFillCart:
    def test_puts_items_into_the_cart(self, client):
        answer = client.post("/shop/cart/", msgspec.json.encode({"invoice": "536365", "items": 7}), "application/json")

        assert answer.status_code == 201
        assert CartEntry.objects.get().change == 7

    def test_says_what_does_not_fit_in_a_request(self, client):
        answer = client.post("/shop/cart/", b"{}", "application/json")

        assert answer.status_code == 400

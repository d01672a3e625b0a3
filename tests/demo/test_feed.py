import pytest

from project.demo.feed import Feed
from project.demo.processes import DemoError
from project.shop.models import Cancellation, CartEntry, Order, Refusal
from project.shop.orders_file import DAY, Invoice, Row, read_orders

ROW = Row(line=2, stock_code="85123A", description="WHITE HANGING HEART", quantity="6", unit_price="2.55")


def invoice(number, **changes):
    given = Row(**{name: changes.get(name, getattr(ROW, name)) for name in Row.__slots__})
    return Invoice(number, "2010-12-01 08:26:00", "17850", "United Kingdom", [given])


def feed_all(url, *invoices):
    feed = Feed(url, invoices, seed=1)
    while not feed.is_empty:
        feed.send_next()


class TestFeed:
    def test_declines_the_same_tenth_of_the_orders_for_the_same_seed(self):
        invoices = read_orders(DAY)

        first, second, other = (Feed("", invoices, seed).declined for seed in (1, 1, 2))

        assert len(first) == 14
        assert first == second != other
        assert not any(number.startswith("C") for number in first)


@pytest.mark.django_db(transaction=True)
class TestSendNext:
    def test_fills_the_cart_and_places_the_order(self, live_server):
        feed_all(live_server.url, invoice("536365"))

        assert CartEntry.objects.get().change == 1
        assert Order.objects.get().invoice == "536365"

    def test_gives_goods_back(self, live_server):
        feed_all(live_server.url, invoice("C536379", quantity="-1"))

        assert Cancellation.objects.get().invoice == "C536379"

    def test_has_payments_declined(self, live_server):
        invoices = [invoice(f"53636{last}") for last in range(10)]

        feed_all(live_server.url, *invoices)

        assert Refusal.objects.get().what == "payment"
        assert Order.objects.count() == 9

    def test_leaves_dirty_lines_to_the_shop(self, live_server):
        feed_all(live_server.url, invoice("536365", unit_price="0.0"))

        assert Refusal.objects.get().what == "line"

    def test_stops_at_an_answer_that_it_does_not_expect(self, live_server):
        with pytest.raises(DemoError, match=r"The shop answered 409 to orders 536365: .*placed before"):
            feed_all(live_server.url, invoice("536365"), invoice("536365"))

    def test_stops_when_nobody_answers(self):
        with pytest.raises(DemoError, match="The shop did not answer to cart 536365"):
            feed_all("http://127.0.0.1:9", invoice("536365"))

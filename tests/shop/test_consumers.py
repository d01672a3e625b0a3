from decimal import Decimal
from uuid import uuid4

import pytest

from outbox import Context, Reject, atomic
from outbox.models import MessageRow
from project.shop.consumers import book_points, clear_cart, ship, take_points_back, write_letter
from project.shop.messages import OrderCancelled, OrderPlaced, OrderShipped
from project.shop.models import CartEntry, Letter, PointsEntry, Shipment

pytestmark = pytest.mark.django_db

ORDER = OrderPlaced(invoice="536365", customer="17850", items=7, total=Decimal("139.12"))
GUEST = OrderPlaced(invoice="536366", customer=None, items=1, total=Decimal("11.10"))


@pytest.fixture
def context():
    return Context(
        message_id=str(uuid4()),
        group="any",
        topic="orders",
        key="536365",
        tag="",
        headers={},
        delivery_count=1,
        idempotency_key="any",
        source="",
        lane=None,
        number=None,
        stored_at=None,
    )


class TestClearCart:
    def test_takes_out_what_was_ordered(self, context):
        clear_cart(ORDER, context)

        assert CartEntry.objects.get().change == -7

    def test_shows_when_it_is_applied_twice(self, context):
        clear_cart(ORDER, context)
        clear_cart(ORDER, context)

        assert CartEntry.objects.count() == 2


class TestBookPoints:
    def test_gives_a_point_for_each_whole_pound(self, context):
        book_points(ORDER, context)

        assert PointsEntry.objects.get().points == 139

    def test_gives_guests_none(self, context):
        book_points(GUEST, context)

        assert not PointsEntry.objects.exists()

    def test_rejects_an_order_that_nobody_paid_for(self, context):
        with pytest.raises(Reject, match="has a total of 0"):
            book_points(OrderPlaced(invoice="536367", customer="17850", items=1, total=Decimal(0)), context)

    def test_shows_when_it_is_applied_twice(self, context):
        book_points(ORDER, context)
        book_points(ORDER, context)

        assert PointsEntry.objects.count() == 2


class TestTakePointsBack:
    def test_takes_a_point_for_each_whole_pound(self, context):
        take_points_back(OrderCancelled(invoice="C536379", customer="17850", orders=[], total=Decimal("27.50")), context)

        assert PointsEntry.objects.get().points == -27


class TestShip:
    def test_makes_the_shipment_and_tells_the_others(self, context):
        with atomic():
            ship(ORDER, context)

        shipment = Shipment.objects.get()
        row = MessageRow.objects.get()
        assert shipment.items == 7
        assert row.about == f"shop.shipment:{shipment.pk}"
        assert OrderShipped.from_body(bytes(row.body)).shipment_id == shipment.pk


class TestWriteLetter:
    @pytest.mark.parametrize(("customer", "name"), [("17850", "17850"), (None, "guest")])
    def test_writes_to_the_customer(self, context, customer, name):
        write_letter(OrderShipped(invoice="536365", customer=customer, shipment_id=1), context)

        assert Letter.objects.get().text.startswith(f"Dear {name},")

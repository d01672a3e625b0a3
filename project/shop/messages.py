"""The messages of the shop. Each contains all data that its consumers need, so that they need not query the order."""

from __future__ import annotations

from decimal import Decimal

from outbox import Message


class OrderPlaced(Message):
    """An order was placed. `customer` is None for a guest; `items` counts its lines."""

    invoice: str
    customer: str | None
    items: int
    total: Decimal

    class Meta:
        topic = "orders"
        key = "invoice"
        tag = "placed"


class OrderCancelled(Message):
    """Goods were returned. `orders` has the invoice numbers of their orders, as far as the shop's tables have them."""

    invoice: str
    customer: str | None
    orders: list[str]
    total: Decimal  # the refunded amount: positive

    class Meta:
        topic = "order-cancellations"
        key = "invoice"
        tag = "cancelled"


class OrderShipped(Message):
    """The parcel of an order was shipped."""

    invoice: str
    customer: str | None
    shipment_id: int

    class Meta:
        topic = "shipments"
        key = "invoice"
        tag = "shipped"

"""The messages of the shop. Each contains everything its consumers need, so they need not look the order up."""

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
    """Goods were given back. `orders` names those they came from; empty when none of them is in our books."""

    invoice: str
    customer: str | None
    orders: list[str]
    total: Decimal  # what is paid back: positive

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

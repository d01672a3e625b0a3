"""The handlers of the shop. Their changes are committed together with an inbox row, so they happen once."""

from __future__ import annotations

from outbox import Context, Reject, RetryPolicy, consumer, publish
from project.shop.messages import OrderCancelled, OrderPlaced, OrderShipped
from project.shop.models import CartEntry, Letter, PointsEntry, Shipment

RETRY = RetryPolicy(limit=16)


@consumer(OrderPlaced, group="cart", retry=RETRY)
def clear_cart(message: OrderPlaced, context: Context) -> None:
    """Remove the ordered items from the cart."""
    CartEntry.objects.create(invoice=message.invoice, change=-message.items)


@consumer(OrderPlaced, group="points", retry=RETRY)
def book_points(message: OrderPlaced, context: Context) -> None:
    """Add a point for each whole pound to the customer's account. Guests have none."""
    if message.total <= 0:
        raise Reject(f"Order {message.invoice} has a total of {message.total}; points are given for what was paid.")
    if message.customer:
        PointsEntry.objects.create(customer_number=message.customer, invoice=message.invoice, points=int(message.total))


@consumer(OrderCancelled, group="points", retry=RETRY)
def take_points_back(message: OrderCancelled, context: Context) -> None:
    """Subtract the points for the refunded amount."""
    if message.customer:
        PointsEntry.objects.create(customer_number=message.customer, invoice=message.invoice, points=-int(message.total))


@consumer(OrderPlaced, group="shipment", retry=RETRY)
def ship(message: OrderPlaced, context: Context) -> None:
    """Create the shipment and publish a message about it, in one transaction."""
    shipment = Shipment.objects.create(invoice=message.invoice, items=message.items)
    publish(OrderShipped(invoice=message.invoice, customer=message.customer, shipment_id=shipment.pk), about=shipment)


@consumer(OrderShipped, group="letters", retry=RETRY)
def write_letter(message: OrderShipped, context: Context) -> None:
    """Write a letter that tells the customer that the parcel has been shipped."""
    Letter.objects.create(
        invoice=message.invoice,
        text=f"Dear {message.customer or 'guest'}, your order {message.invoice} is on its way.",
    )

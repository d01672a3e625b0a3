"""
The shop's tables.

The tables that consumers write to (cart, points, shipments, letters) have no unique constraints, and refer to an order by its
invoice number instead of a foreign key. So a change that was applied twice, or for an order that was never placed, is visible.
"""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Customer(models.Model):
    number = models.TextField(primary_key=True)
    country = models.TextField()

    def __str__(self) -> str:
        return self.number


class Product(models.Model):
    stock_code = models.TextField(primary_key=True)
    description = models.TextField()

    def __str__(self) -> str:
        return f"{self.stock_code} {self.description}"


class Order(models.Model):
    invoice = models.TextField(unique=True)
    customer = models.ForeignKey(Customer, models.PROTECT, null=True, related_name="orders")  # NULL: a guest
    country = models.TextField()
    invoiced_at = models.DateTimeField()
    total = models.DecimalField(max_digits=12, decimal_places=2)
    placed_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"order {self.invoice}"


class OrderLine(models.Model):
    order = models.ForeignKey(Order, models.CASCADE, related_name="lines")
    product = models.ForeignKey(Product, models.PROTECT, related_name="order_lines")
    quantity = models.PositiveIntegerField()
    unit_price = models.DecimalField(max_digits=10, decimal_places=2)
    cancelled = models.PositiveIntegerField(default=0)  # the part of the quantity that was returned

    class Meta:
        constraints = [
            models.CheckConstraint(condition=models.Q(cancelled__lte=models.F("quantity")), name="shop_line_not_overcancelled")
        ]

    def __str__(self) -> str:
        return f"{self.quantity} x {self.product_id}"


class Cancellation(models.Model):
    invoice = models.TextField(unique=True)
    customer = models.ForeignKey(Customer, models.PROTECT, null=True, related_name="cancellations")
    country = models.TextField()
    invoiced_at = models.DateTimeField()
    total = models.DecimalField(max_digits=12, decimal_places=2)  # the refunded amount: positive
    cancelled_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"cancellation {self.invoice}"


class CancellationLine(models.Model):
    """
    Returned goods. `order_line` is the order line with which they were bought.

    It is NULL if no order of the customer in the shop's tables has enough of them, since they were bought on another day, or the
    line is a discount.
    """

    cancellation = models.ForeignKey(Cancellation, models.CASCADE, related_name="lines")
    order_line = models.ForeignKey(OrderLine, models.PROTECT, null=True, related_name="cancellations")
    product = models.ForeignKey(Product, models.PROTECT, related_name="cancellation_lines")
    quantity = models.PositiveIntegerField()
    unit_price = models.DecimalField(max_digits=10, decimal_places=2)

    def __str__(self) -> str:
        return f"{self.quantity} x {self.product_id}"


class Refusal(models.Model):
    """A refused line, order or payment, with the reason and its content. A refused payment contains its whole order."""

    class What(models.TextChoices):
        LINE = "line"
        ORDER = "order"
        PAYMENT = "payment"

    what = models.TextField(choices=What)
    invoice = models.TextField(db_index=True)
    line = models.PositiveIntegerField(null=True)  # its number in the input, from 1
    reason = models.TextField()
    content = models.JSONField()
    refused_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"{self.what} of {self.invoice}: {self.reason}"


class CartEntry(models.Model):
    """A change of a cart, which has the number of its later invoice. The sum of its changes is the number of items in it."""

    invoice = models.TextField(db_index=True)
    change = models.IntegerField()
    changed_at = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name_plural = "cart entries"

    def __str__(self) -> str:
        return f"cart {self.invoice}: {self.change:+}"


class PointsEntry(models.Model):
    """Points that a customer earned with an order, or lost with a cancellation."""

    customer_number = models.TextField(db_index=True)
    invoice = models.TextField(db_index=True)
    points = models.IntegerField()
    booked_at = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name_plural = "points entries"

    def __str__(self) -> str:
        return f"{self.customer_number}: {self.points:+}"


class Shipment(models.Model):
    invoice = models.TextField(db_index=True)
    items = models.PositiveIntegerField()
    shipped_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"shipment of {self.invoice}"


class Letter(models.Model):
    """A letter to a customer."""

    invoice = models.TextField(db_index=True)
    text = models.TextField()
    written_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"letter about {self.invoice}"

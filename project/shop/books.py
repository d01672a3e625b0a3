"""Store orders, cancellations and refusals. Call each function in a transaction."""

from __future__ import annotations

from typing import Any

import msgspec
from django.db.models import F

from project.shop.intake import AcceptedLine, AlreadyKnown, SubmittedInvoice, Validated
from project.shop.models import Cancellation, CancellationLine, Customer, Order, OrderLine, Product, Refusal


def write_order(submitted: SubmittedInvoice, validated: Validated) -> Order:
    """
    Store an order with its accepted lines.

    Raises:
        AlreadyKnown: there is an order with this invoice number.
    """
    if Order.objects.filter(invoice=submitted.invoice).exists():
        raise AlreadyKnown(f"Order {submitted.invoice} was placed before.")
    order = Order.objects.create(**_head(submitted, validated))
    _write_products(validated.accepted)
    OrderLine.objects.bulk_create(
        OrderLine(order=order, product_id=line.stock_code, quantity=line.quantity, unit_price=line.unit_price)
        for line in validated.accepted
    )
    return order


def write_cancellation(submitted: SubmittedInvoice, validated: Validated) -> Cancellation:
    """
    Store a cancellation, and add its accepted lines to the cancelled quantities of the customer's orders.

    Raises:
        AlreadyKnown: there is a cancellation with this invoice number.
    """
    if Cancellation.objects.filter(invoice=submitted.invoice).exists():
        raise AlreadyKnown(f"Cancellation {submitted.invoice} was written before.")
    cancellation = Cancellation.objects.create(**_head(submitted, validated))
    _write_products(validated.accepted)
    for line in validated.accepted:
        CancellationLine.objects.create(
            cancellation=cancellation,
            order_line=_cancel_bought_line(cancellation, line),
            product_id=line.stock_code,
            quantity=line.quantity,
            unit_price=line.unit_price,
        )
    return cancellation


def store_refused_lines(submitted: SubmittedInvoice, validated: Validated) -> None:
    """Store refused lines with their reasons."""
    Refusal.objects.bulk_create(
        Refusal(
            what=Refusal.What.LINE,
            invoice=submitted.invoice,
            line=refused.line.line,
            reason=refused.reason,
            content=msgspec.to_builtins(refused.line),
        )
        for refused in validated.refused
    )


def store_refusal(what: Refusal.What, submitted: SubmittedInvoice, reason: str) -> None:
    """Store a refused invoice with the reason."""
    Refusal.objects.create(what=what, invoice=submitted.invoice, reason=reason, content=msgspec.to_builtins(submitted))


def _head(submitted: SubmittedInvoice, validated: Validated) -> dict[str, Any]:
    """Return the fields that orders and cancellations have in common; create the customer if necessary."""
    customer: Customer | None = None
    if submitted.customer:
        customer, _ = Customer.objects.get_or_create(number=submitted.customer, defaults={"country": submitted.country})
    return {
        "invoice": submitted.invoice,
        "customer": customer,
        "country": submitted.country,
        "invoiced_at": validated.invoiced_at,
        "total": validated.total,
    }


def _write_products(lines: list[AcceptedLine]) -> None:
    # In the order of stock codes, so that two orders of the same products cannot deadlock.
    names = {line.stock_code: line.description for line in sorted(lines, key=lambda line: line.stock_code)}
    Product.objects.bulk_create(
        [Product(stock_code=code, description=description) for code, description in names.items()],
        ignore_conflicts=True,
    )


def _cancel_bought_line(cancellation: Cancellation, line: AcceptedLine) -> OrderLine | None:
    """
    Add the quantity to `cancelled` of the order line with which the customer bought the goods, and return that line.

    It is the latest line whose quantity suffices. Return None if there is none.
    """
    if cancellation.customer is None:
        return None
    bought = (
        OrderLine.objects.select_for_update(of=("self",))
        .filter(
            order__customer=cancellation.customer,
            order__invoiced_at__lte=cancellation.invoiced_at,
            product_id=line.stock_code,
            quantity__gte=F("cancelled") + line.quantity,
        )
        .order_by("-order__invoiced_at", "-pk")
        .first()
    )
    if bought is not None:
        bought.cancelled += line.quantity
        bought.save(update_fields=["cancelled"])
    return bought


def cancelled_orders(cancellation: Cancellation) -> list[str]:
    """Return the invoice numbers of the orders that a cancellation refers to."""
    lines = CancellationLine.objects.filter(cancellation=cancellation, order_line__isnull=False)
    return sorted(lines.values_list("order_line__order__invoice", flat=True).distinct())

"""Write orders and cancellations. Each function must be called in a transaction."""

from __future__ import annotations

from typing import Any

import msgspec
from django.db.models import F

from project.shop.intake import AlreadyKnown, GoodLine, Judged, SubmittedInvoice
from project.shop.models import Cancellation, CancellationLine, Customer, Order, OrderLine, Product, Refusal


def write_order(submitted: SubmittedInvoice, judged: Judged) -> Order:
    """Write an order with its accepted lines. Raises AlreadyKnown."""
    if Order.objects.filter(invoice=submitted.invoice).exists():
        raise AlreadyKnown(f"Order {submitted.invoice} was placed before.")
    order = Order.objects.create(**_head(submitted, judged))
    _write_products(judged.good)
    OrderLine.objects.bulk_create(
        OrderLine(order=order, product_id=line.stock_code, quantity=line.quantity, unit_price=line.unit_price)
        for line in judged.good
    )
    return order


def write_cancellation(submitted: SubmittedInvoice, judged: Judged) -> Cancellation:
    """Write a cancellation, and subtract its accepted lines from their orders. Raises AlreadyKnown."""
    if Cancellation.objects.filter(invoice=submitted.invoice).exists():
        raise AlreadyKnown(f"Cancellation {submitted.invoice} was written before.")
    cancellation = Cancellation.objects.create(**_head(submitted, judged))
    _write_products(judged.good)
    for line in judged.good:
        CancellationLine.objects.create(
            cancellation=cancellation,
            order_line=_take_off_order(cancellation, line),
            product_id=line.stock_code,
            quantity=line.quantity,
            unit_price=line.unit_price,
        )
    return cancellation


def refuse_lines(submitted: SubmittedInvoice, judged: Judged) -> None:
    """Store rejected lines with their reasons."""
    Refusal.objects.bulk_create(
        Refusal(
            what=Refusal.What.LINE,
            invoice=submitted.invoice,
            line=refused.line.line,
            reason=refused.reason,
            content=msgspec.to_builtins(refused.line),
        )
        for refused in judged.refused
    )


def refuse(what: Refusal.What, submitted: SubmittedInvoice, reason: str) -> None:
    """Store a rejected invoice."""
    Refusal.objects.create(what=what, invoice=submitted.invoice, reason=reason, content=msgspec.to_builtins(submitted))


def _head(submitted: SubmittedInvoice, judged: Judged) -> dict[str, Any]:
    """Return the fields that orders and cancellations have in common; create the customer if necessary."""
    customer: Customer | None = None
    if submitted.customer:
        customer, _ = Customer.objects.get_or_create(number=submitted.customer, defaults={"country": submitted.country})
    return {
        "invoice": submitted.invoice,
        "customer": customer,
        "country": submitted.country,
        "invoiced_at": judged.invoiced_at,
        "total": judged.total,
    }


def _write_products(lines: list[GoodLine]) -> None:
    # Sorted, so that two orders of the same products lock them in the same order.
    names = {line.stock_code: line.description for line in sorted(lines, key=lambda line: line.stock_code)}
    Product.objects.bulk_create(
        [Product(stock_code=code, description=description) for code, description in names.items()],
        ignore_conflicts=True,
    )


def _take_off_order(cancellation: Cancellation, line: GoodLine) -> OrderLine | None:
    """Add the quantity to `cancelled` of the customer's latest order line with enough left, and return that line."""
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


def orders_given_back(cancellation: Cancellation) -> list[str]:
    """Return the invoices of the orders that a cancellation refers to."""
    found = CancellationLine.objects.filter(cancellation=cancellation, order_line__isnull=False)
    return sorted(found.values_list("order_line__order__invoice", flat=True).distinct())

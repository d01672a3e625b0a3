"""
The shop's views: they take and return JSON.

`place_order` and `cancel_order` store an order or a cancellation and publish a message in one transaction.
`place_order_half_first` sends the half message to the broker before its transaction begins. An exception rolls back rows and
message. `handles_shop_errors` is outside of the transaction: it stores the refusal and returns the response.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import msgspec
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from outbox import Receipt, publish, transactional
from outbox.errors import HalfNotStored
from project.shop import books
from project.shop.intake import NotAccepted, ShopError, SubmittedInvoice, Validated, read_invoice, validate
from project.shop.messages import OrderCancelled, OrderPlaced
from project.shop.models import CartEntry, Order, Refusal

DECLINED = "declined"  # a payment of this kind is always declined, as the test cards of payment services are


class PaymentDeclined(ShopError):
    """Raised when the customer's bank declines the payment, after the order was stored and published."""

    status = 402


def handles_shop_errors(view: Callable[[HttpRequest, SubmittedInvoice], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Parse the invoice for a view. If the view's transaction is rolled back with a ShopError, store the refusal, and respond."""

    @csrf_exempt
    @require_POST
    @wraps(view)
    def wrapped(request: HttpRequest) -> HttpResponse:
        try:
            submitted = read_invoice(request.body)
        except ShopError as error:
            return JsonResponse({"error": str(error)}, status=error.status)
        try:
            return view(request, submitted)
        except ShopError as error:
            what = Refusal.What.PAYMENT if isinstance(error, PaymentDeclined) else Refusal.What.ORDER
            books.store_refusal(what, submitted, str(error))
            return JsonResponse({"error": str(error)}, status=error.status)
        except HalfNotStored:
            return JsonResponse({"error": "Nothing was done. Try again in a moment."}, status=503)

    return wrapped


class CartFilling(msgspec.Struct, frozen=True):
    """The number of items that are put into a cart, which has the number of its later invoice."""

    invoice: str
    items: int


@csrf_exempt
@require_POST
def fill_cart(request: HttpRequest) -> HttpResponse:
    """Put items into a cart."""
    try:
        filling = msgspec.json.decode(request.body, type=CartFilling)
    except msgspec.DecodeError as error:
        return JsonResponse({"error": f"The request is not a cart: {error}."}, status=400)
    CartEntry.objects.create(invoice=filling.invoice, change=filling.items)
    return JsonResponse({"invoice": filling.invoice}, status=201)


@handles_shop_errors
@transactional
def place_order(request: HttpRequest, submitted: SubmittedInvoice) -> HttpResponse:
    """Place an order: store it, publish a message, and take the payment."""
    validated = validate(submitted, cancels=False)
    books.store_refused_lines(submitted, validated)
    if not validated.accepted:
        return _no_line_accepted(validated)
    order = books.write_order(submitted, validated)
    receipt = publish(
        OrderPlaced(invoice=order.invoice, customer=submitted.customer or None, items=len(validated.accepted), total=order.total),
        about=order,
    )
    _take_payment(order, submitted.payment)
    return _accepted(submitted, validated, receipt)


def announce_order(request: HttpRequest, submitted: SubmittedInvoice) -> OrderPlaced:
    """Return the message about an order that is not stored yet. The invoice number identifies the order, so it needs no row."""
    validated = validate(submitted, cancels=False)
    if not validated.accepted:
        raise NotAccepted("No line of this invoice can be accepted.")
    customer = submitted.customer or None
    return OrderPlaced(invoice=submitted.invoice, customer=customer, items=len(validated.accepted), total=validated.total)


@handles_shop_errors
@transactional(half_first=announce_order)
def place_order_half_first(request: HttpRequest, submitted: SubmittedInvoice, message: OrderPlaced) -> HttpResponse:
    """Place an order whose half message the broker already has, so that no payment is taken without its message."""
    validated = validate(submitted, cancels=False)
    books.store_refused_lines(submitted, validated)
    order = books.write_order(submitted, validated)
    _take_payment(order, submitted.payment)
    return JsonResponse({"invoice": message.invoice, "refused": _reasons(validated)}, status=201)


@handles_shop_errors
@transactional
def cancel_order(request: HttpRequest, submitted: SubmittedInvoice) -> HttpResponse:
    """
    Cancel goods: store the cancellation, and publish a message.

    Goods that are in no order of the customer are accepted, too (see `CancellationLine`).
    """
    validated = validate(submitted, cancels=True)
    books.store_refused_lines(submitted, validated)
    if not validated.accepted:
        return _no_line_accepted(validated)
    cancellation = books.write_cancellation(submitted, validated)
    receipt = publish(
        OrderCancelled(
            invoice=cancellation.invoice,
            customer=submitted.customer or None,
            orders=books.cancelled_orders(cancellation),
            total=cancellation.total,
        ),
        about=cancellation,
    )
    return _accepted(submitted, validated, receipt)


def _take_payment(order: Order, payment: str) -> None:
    if payment == DECLINED:
        raise PaymentDeclined(f"The payment of order {order.invoice} was declined.")


def _accepted(submitted: SubmittedInvoice, validated: Validated, receipt: Receipt) -> HttpResponse:
    return JsonResponse(
        {"invoice": submitted.invoice, "message_id": str(receipt.message_id), "refused": _reasons(validated)}, status=201
    )


def _no_line_accepted(validated: Validated) -> HttpResponse:
    """Return the response for an invoice without an accepted line. No exception is raised, so the refused lines are committed."""
    error = "No line of this invoice can be accepted." if validated.refused else "This invoice has no lines."
    return JsonResponse({"error": error, "refused": _reasons(validated)}, status=NotAccepted.status)


def _reasons(validated: Validated) -> list[dict[str, object]]:
    return [{"line": refused.line.line, "reason": refused.reason} for refused in validated.refused]

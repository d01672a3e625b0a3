"""
The shop's doors for other programs: JSON in, JSON out.

`place_order` and `cancel_order` change the books and publish as one act, `place_order_half_first` has the broker take the
message first. Whatever they raise rolls back both; the answer, and the note of what was refused, are made outside, by `answers`.
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
from project.shop.intake import Judged, NotAccepted, ShopError, SubmittedInvoice, judge, read_invoice
from project.shop.messages import OrderCancelled, OrderPlaced
from project.shop.models import CartEntry, Order, Refusal

DECLINED = "declined"  # a payment of this kind is always declined, as the test cards of payment services are


class PaymentDeclined(ShopError):
    """Raised when the customer's bank refuses, after the order was written and published."""

    status = 402


def answers(view: Callable[[HttpRequest, SubmittedInvoice], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Read the invoice; turn a ShopError into an answer and a refusal, both after the transaction was rolled back."""

    @csrf_exempt
    @require_POST
    @wraps(view)
    def door(request: HttpRequest) -> HttpResponse:
        try:
            submitted = read_invoice(request.body)
        except ShopError as error:
            return JsonResponse({"error": str(error)}, status=error.status)
        try:
            return view(request, submitted)
        except ShopError as error:
            what = Refusal.What.PAYMENT if isinstance(error, PaymentDeclined) else Refusal.What.ORDER
            books.refuse(what, submitted, str(error))
            return JsonResponse({"error": str(error)}, status=error.status)
        except HalfNotStored:
            return JsonResponse({"error": "Nothing was done. Try again in a moment."}, status=503)

    return door


class CartFilling(msgspec.Struct, frozen=True):
    """What goes into a cart. It has the number its invoice will get."""

    invoice: str
    items: int


@csrf_exempt
@require_POST
def fill_cart(request: HttpRequest) -> HttpResponse:
    """Put a quantity of an item into a cart."""
    try:
        filling = msgspec.json.decode(request.body, type=CartFilling)
    except msgspec.DecodeError as error:
        return JsonResponse({"error": f"The request is not a cart: {error}."}, status=400)
    CartEntry.objects.create(invoice=filling.invoice, change=filling.items)
    return JsonResponse({"invoice": filling.invoice}, status=201)


@answers
@transactional
def place_order(request: HttpRequest, submitted: SubmittedInvoice) -> HttpResponse:
    """Place an order: write it, publish it, take the money."""
    judged = judge(submitted, cancels=False)
    books.refuse_lines(submitted, judged)
    if not judged.good:
        return _nothing_left(judged)
    order = books.write_order(submitted, judged)
    receipt = publish(
        OrderPlaced(invoice=order.invoice, customer=submitted.customer or None, items=len(judged.good), total=order.total),
        about=order,
    )
    _take_payment(order, submitted.payment)
    return _accepted(submitted, judged, receipt)


def announce_order(request: HttpRequest, submitted: SubmittedInvoice) -> OrderPlaced:
    """Return what the order will be, by what was submitted alone: the invoice number is its key."""
    judged = judge(submitted, cancels=False)
    if not judged.good:
        raise NotAccepted("No line of this invoice can be accepted.")
    customer = submitted.customer or None
    return OrderPlaced(invoice=submitted.invoice, customer=customer, items=len(judged.good), total=judged.total)


@answers
@transactional(half_first=announce_order)
def place_order_half_first(request: HttpRequest, submitted: SubmittedInvoice, message: OrderPlaced) -> HttpResponse:
    """Place an order whose half message the broker already has, so that no payment is taken without its message."""
    judged = judge(submitted, cancels=False)
    books.refuse_lines(submitted, judged)
    order = books.write_order(submitted, judged)
    _take_payment(order, submitted.payment)
    return JsonResponse({"invoice": message.invoice, "refused": _reasons(judged)}, status=201)


@answers
@transactional
def cancel_order(request: HttpRequest, submitted: SubmittedInvoice) -> HttpResponse:
    """
    Return goods back: write the cancellation, publish it.

    Goods that none of the customer's orders in our books holds stand against the customer alone.
    """
    judged = judge(submitted, cancels=True)
    books.refuse_lines(submitted, judged)
    if not judged.good:
        return _nothing_left(judged)
    cancellation = books.write_cancellation(submitted, judged)
    receipt = publish(
        OrderCancelled(
            invoice=cancellation.invoice,
            customer=submitted.customer or None,
            orders=books.orders_given_back(cancellation),
            total=cancellation.total,
        ),
        about=cancellation,
    )
    return _accepted(submitted, judged, receipt)


def _take_payment(order: Order, payment: str) -> None:
    if payment == DECLINED:
        raise PaymentDeclined(f"The payment of order {order.invoice} was declined.")


def _accepted(submitted: SubmittedInvoice, judged: Judged, receipt: Receipt) -> HttpResponse:
    return JsonResponse(
        {"invoice": submitted.invoice, "message_id": str(receipt.message_id), "refused": _reasons(judged)}, status=201
    )


def _nothing_left(judged: Judged) -> HttpResponse:
    """Answer that no line is good. It commits: the refused lines are kept."""
    error = "No line of this invoice can be accepted." if judged.refused else "This invoice has no lines."
    return JsonResponse({"error": error, "refused": _reasons(judged)}, status=NotAccepted.status)


def _reasons(judged: Judged) -> list[dict[str, object]]:
    return [{"line": refused.line.line, "reason": refused.reason} for refused in judged.refused]

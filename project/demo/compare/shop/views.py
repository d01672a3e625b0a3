"""The shop's views: they store an order or a cancellation in a transaction, and send messages in one of the three ways."""

from __future__ import annotations

from functools import partial

import msgspec
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse

from outbox import publish
from outbox.failpoints import failpoint
from project.demo.compare.kills import COMMITTED, SENT
from project.demo.compare.shop import OUTBOX, tasks, way
from project.demo.compare.shop.sending import send
from project.shop import books
from project.shop.intake import NotAccepted, SubmittedInvoice, validate
from project.shop.messages import OrderCancelled, OrderPlaced
from project.shop.views import DECLINED, PaymentDeclined, handles_shop_errors

TASKS = {OrderPlaced: (tasks.clear_cart, tasks.book_points, tasks.ship), OrderCancelled: (tasks.take_points_back,)}


def announce(message: OrderPlaced | OrderCancelled) -> None:
    """Send a message to its handlers in the chosen way. This is the only difference between the three ways in the views."""
    if way() == OUTBOX:
        publish(message)
        return
    for task in TASKS[type(message)]:
        send(task, **msgspec.to_builtins(message))


@handles_shop_errors
@transaction.atomic
def place_order(request: HttpRequest, submitted: SubmittedInvoice) -> HttpResponse:
    validated = validate(submitted, cancels=False)
    books.store_refused_lines(submitted, validated)
    if not validated.accepted:
        return _no_line_accepted()
    order = books.write_order(submitted, validated)
    transaction.on_commit(partial(failpoint, COMMITTED))  # registered first, so it runs before any on_commit callback that sends
    announce(
        OrderPlaced(invoice=order.invoice, customer=submitted.customer or None, items=len(validated.accepted), total=order.total)
    )
    failpoint(SENT)
    if submitted.payment == DECLINED:
        raise PaymentDeclined(f"The payment of order {order.invoice} was declined.")
    return JsonResponse({"invoice": order.invoice}, status=201)


@handles_shop_errors
@transaction.atomic
def cancel_order(request: HttpRequest, submitted: SubmittedInvoice) -> HttpResponse:
    validated = validate(submitted, cancels=True)
    books.store_refused_lines(submitted, validated)
    if not validated.accepted:
        return _no_line_accepted()
    cancellation = books.write_cancellation(submitted, validated)
    orders, customer = books.cancelled_orders(cancellation), submitted.customer or None
    announce(OrderCancelled(invoice=cancellation.invoice, customer=customer, orders=orders, total=cancellation.total))
    return JsonResponse({"invoice": cancellation.invoice}, status=201)


def _no_line_accepted() -> HttpResponse:
    return JsonResponse({"error": "No line of this invoice can be accepted."}, status=NotAccepted.status)

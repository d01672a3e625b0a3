"""The shop's views, which write the books in a transaction and send by the chosen way."""

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
from project.shop.intake import NotAccepted, SubmittedInvoice, judge
from project.shop.messages import OrderCancelled, OrderPlaced
from project.shop.views import DECLINED, PaymentDeclined, answers

TASKS = {OrderPlaced: (tasks.clear_cart, tasks.book_points, tasks.ship), OrderCancelled: (tasks.take_points_back,)}


def announce(message: OrderPlaced | OrderCancelled) -> None:
    """Send a message to its handlers by the chosen way, the only difference between the views of the three shops."""
    if way() == OUTBOX:
        publish(message)
        return
    for task in TASKS[type(message)]:
        send(task, **msgspec.to_builtins(message))


@answers
@transaction.atomic
def place_order(request: HttpRequest, submitted: SubmittedInvoice) -> HttpResponse:
    judged = judge(submitted, cancels=False)
    books.refuse_lines(submitted, judged)
    if not judged.good:
        return _nothing_left()
    order = books.write_order(submitted, judged)
    transaction.on_commit(partial(failpoint, COMMITTED))  # before all that is sent after the commit
    announce(OrderPlaced(invoice=order.invoice, customer=submitted.customer or None, items=len(judged.good), total=order.total))
    failpoint(SENT)
    if submitted.payment == DECLINED:
        raise PaymentDeclined(f"The payment of order {order.invoice} was declined.")
    return JsonResponse({"invoice": order.invoice}, status=201)


@answers
@transaction.atomic
def cancel_order(request: HttpRequest, submitted: SubmittedInvoice) -> HttpResponse:
    judged = judge(submitted, cancels=True)
    books.refuse_lines(submitted, judged)
    if not judged.good:
        return _nothing_left()
    cancellation = books.write_cancellation(submitted, judged)
    orders, customer = books.orders_given_back(cancellation), submitted.customer or None
    announce(OrderCancelled(invoice=cancellation.invoice, customer=customer, orders=orders, total=cancellation.total))
    return JsonResponse({"invoice": cancellation.invoice}, status=201)


def _nothing_left() -> HttpResponse:
    return JsonResponse({"error": "No line of this invoice can be accepted."}, status=NotAccepted.status)

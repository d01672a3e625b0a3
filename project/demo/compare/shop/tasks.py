"""The shop's handlers as Celery tasks, each with its writes in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal

from celery import Task, shared_task
from django.db import transaction

from outbox.failpoints import failpoint
from project.demo.compare.shop.sending import send
from project.demo.kills import UNACKED, WRITTEN
from project.shop.models import CartEntry, Letter, PointsEntry, Shipment

# A task of a killed worker runs again, and a task that fails is retried as often as a message of the outbox.
reliable_task: Callable[[Callable[..., None]], Task[..., None]] = shared_task(
    acks_late=True, reject_on_worker_lost=True, autoretry_for=(Exception,), retry_backoff=True, max_retries=16
)


@contextmanager
def handling(group: str) -> Iterator[None]:
    """Run the block in one transaction. The failpoints are at the same points as in a consumer; their names include the group."""
    with transaction.atomic():
        yield
        failpoint(f"{WRITTEN}.{group}")
    failpoint(f"{UNACKED}.{group}")


@reliable_task
def clear_cart(invoice: str, customer: str | None, items: int, total: str) -> None:
    with handling("cart"):
        CartEntry.objects.create(invoice=invoice, change=-items)


@reliable_task
def book_points(invoice: str, customer: str | None, items: int, total: str) -> None:
    with handling("points"):
        if customer:
            PointsEntry.objects.create(customer_number=customer, invoice=invoice, points=int(Decimal(total)))


@reliable_task
def take_points_back(invoice: str, customer: str | None, orders: list[str], total: str) -> None:
    with handling("points"):
        if customer:
            PointsEntry.objects.create(customer_number=customer, invoice=invoice, points=-int(Decimal(total)))


@reliable_task
def ship(invoice: str, customer: str | None, items: int, total: str) -> None:
    with handling("shipment"):
        Shipment.objects.create(invoice=invoice, items=items)
        send(write_letter, invoice=invoice, customer=customer)


@reliable_task
def write_letter(invoice: str, customer: str | None) -> None:
    with handling("letters"):
        Letter.objects.create(invoice=invoice, text=f"Dear {customer or 'guest'}, your order {invoice} is on its way.")

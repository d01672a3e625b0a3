"""What `publish()` adds to a transaction that writes one row by the ORM, and to raw SQL that writes the same rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
from django.db import connection, transaction

from benchmarks.figure import Figure, interleaved, percentile
from benchmarks.messages import BenchOrder
from benchmarks.models import TABLE, Order
from outbox import publish
from outbox.ids import uuid7
from outbox.models import MessageRow
from outbox.topics import topic_id

# The rows of `publish()` by one statement. It is sent by psycopg's own cursor, so prepared after five times.
BOTH_ROWS = """
WITH m AS (INSERT INTO outbox_message (id, topic_id, key, headers, body) VALUES (%s, %s, %s, %s, %s))
INSERT INTO outbox_ticket (message_id, topic_id) VALUES (%s, %s)
"""

# The same as somebody writes them by hand, over Django's cursor.
MESSAGE = "INSERT INTO outbox_message (id, topic_id, key, headers, body) VALUES (%s, %s, %s, %s, %s)"
TICKET = "INSERT INTO outbox_ticket (message_id, topic_id) VALUES (%s, %s)"

PER_ROUND = 10


def measure(scale: float) -> list[Figure]:
    """Compare the p50 of a one-row transaction without a message, with one, and with the message's rows by raw SQL."""
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    rows = _RawRows.of_a_message()
    subjects = (_order, _order_with_message, rows.add_by_one_statement, rows.add_by_two_inserts)
    rounds = [lambda subject=subject: _p50(subject) for subject in subjects]  # type: ignore[misc]
    interleaved(10, *rounds)  # warm
    without, value, one, two = interleaved(max(5, int(500 * scale)), *rounds)
    return [
        Figure("publish: p50 of a one-row transaction", value, "us", 1.4, at_most=True, bound=without),
        Figure("publish: beside raw SQL, one statement", value, "us", 1.1, at_most=True, bound=one),
        Figure("publish: beside raw SQL, two by Django", value, "us", None, at_most=True, bound=two),
    ]


def _p50(subject: Callable[[], None]) -> float:
    seen = []
    for _ in range(PER_ROUND):
        began = time.perf_counter()
        subject()
        seen.append((time.perf_counter() - began) * 1e6)
    return percentile(seen, 0.5)


def _order() -> None:
    with transaction.atomic():
        Order.objects.create(customer="17850", total="15.30")


def _order_with_message() -> None:
    with transaction.atomic():
        order = Order.objects.create(customer="17850", total="15.30")
        publish(BenchOrder(order_id=order.pk, customer=order.customer, total=order.total))


class _RawRows:
    """Adds the rows of one message to the order's transaction repeatedly, with new ids."""

    def __init__(self, row: MessageRow) -> None:
        self._columns: list[Any] = [row.topic_id, row.key, row.headers, bytes(row.body)]

    @classmethod
    def of_a_message(cls) -> _RawRows:
        _order_with_message()
        topic = topic_id(BenchOrder._meta.topic, connection.alias)
        return cls(MessageRow.objects.filter(topic_id=topic).latest("id"))

    def add_by_one_statement(self) -> None:
        with transaction.atomic():
            Order.objects.create(customer="17850", total="15.30")
            message_id = uuid7()
            with psycopg.Cursor(connection.connection) as cursor:
                cursor.execute(BOTH_ROWS, [message_id, *self._columns, message_id, self._columns[0]])

    def add_by_two_inserts(self) -> None:
        with transaction.atomic():
            Order.objects.create(customer="17850", total="15.30")
            message_id = uuid7()
            with connection.cursor() as cursor:
                cursor.execute(MESSAGE, [message_id, *self._columns])
                cursor.execute(TICKET, [message_id, self._columns[0]])

"""What `publish()` adds to a transaction that writes one row."""

from __future__ import annotations

import time
from collections.abc import Callable

from django.db import connection, transaction

from benchmarks.figure import Figure, interleaved, percentile
from benchmarks.messages import BenchOrder
from outbox import publish

TABLE = "CREATE TABLE IF NOT EXISTS bench_order (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text, total text)"
INSERT = "INSERT INTO bench_order (customer, total) VALUES (%s, %s) RETURNING id"
PER_ROUND = 300


def measure(scale: float) -> list[Figure]:
    """Compare the p50 of a one-row transaction with and without a message."""
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    rounds = max(5, int(20 * scale))
    _p50(_order_with_message)  # warm
    bound, value = interleaved(rounds, lambda: _p50(_order), lambda: _p50(_order_with_message))
    return [Figure("publish: p50 of a one-row transaction", value, "us", 1.6, at_most=True, bound=bound)]


def _p50(subject: Callable[[], None]) -> float:
    seen = []
    for _ in range(PER_ROUND):
        began = time.perf_counter()
        subject()
        seen.append((time.perf_counter() - began) * 1e6)
    return percentile(seen, 0.5)


def _order() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(INSERT, ["17850", "15.30"])
        cursor.fetchone()


def _order_with_message() -> None:
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(INSERT, ["17850", "15.30"])
            number = cursor.fetchone()[0]
        publish(BenchOrder(order_id=number, customer="17850", total="15.30"))

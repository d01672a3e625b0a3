"""From the commit of the publishing transaction to the start of the handler, through resident relay and embedded broker."""

from __future__ import annotations

import time

from django.db import connection, transaction

from benchmarks.figure import Figure, percentile
from benchmarks.messages import Clocked, ClockedOnRocketMQ
from benchmarks.processes import command, count, is_up, wait_until
from outbox import publish

TABLE = "DROP TABLE IF EXISTS bench_handled; CREATE TABLE bench_handled (number int PRIMARY KEY, handled_at float8)"
PAUSE_SECONDS = 0.02


def measure(scale: float) -> list[Figure]:
    """Publish one message each 20 ms and compare the clocks."""
    with command("outbox_relay", "--broker", "default") as relay, command("outbox_consume", "--group", "bench"):
        wait_until(lambda: is_up(relay), 30, "a relay")
        taken = clock(Clocked, max(50, int(500 * scale)))
    return [Figure("commit to handler: p50", percentile(taken, 0.5), "ms", 20, at_most=True, note=words(taken))]


def clock(kind: type[Clocked | ClockedOnRocketMQ], messages: int) -> list[float]:
    """Return the milliseconds that each message took, while relay and consumer run."""
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    _round(kind, 20, first=0)  # all connections are open, all code is loaded
    committed = _round(kind, messages, first=1000)
    with connection.cursor() as cursor:
        cursor.execute("SELECT number, handled_at FROM bench_handled WHERE number >= 1000")
        return [(handled - committed[number]) * 1000 for number, handled in cursor.fetchall()]


def words(taken: list[float]) -> str:
    """Return what a p50 does not."""
    return f"p95 {percentile(taken, 0.95):.1f} ms, p99 {percentile(taken, 0.99):.1f} ms, {len(taken)} messages"


def _round(kind: type[Clocked | ClockedOnRocketMQ], messages: int, *, first: int) -> dict[int, float]:
    committed = {}
    for number in range(first, first + messages):
        with transaction.atomic():
            publish(kind(number=number))
        committed[number] = time.time()
        time.sleep(PAUSE_SECONDS)
    arrived = "SELECT count(*) FROM bench_handled WHERE number BETWEEN %s AND %s"
    wait_until(lambda: count(arrived, first, first + messages - 1) == messages, 60, "all messages handled")
    return committed

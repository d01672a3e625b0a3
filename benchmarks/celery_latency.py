"""From commit to the start of a Celery task: through a long-running relay, beside `delay_on_commit`, in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from django.db import connection, transaction

from benchmarks import latency
from benchmarks.figure import Figure, percentile
from benchmarks.processes import command, is_up, program, wait_until

RATES = (10, 100)
SECONDS = 10
ROUNDS = 3
WORKER = ("-m", "celery", "-A", "benchmarks.celery_worker", "worker", "--concurrency", "2", "--loglevel", "WARNING")
BARE = ("--without-gossip", "--without-mingle", "--without-heartbeat")


def measure(scale: float) -> list[Figure]:
    """Compare both at each rate, with one worker. The environment and the settings name the server already."""
    from benchmarks.celery_worker import clocked

    found = []
    with command("outbox_relay", "--broker", "celery") as relay, program(sys.executable, *WORKER, *BARE):
        wait_until(lambda: is_up(relay), 30, "a relay")
        for rate in RATES:
            count = max(20, int(rate * SECONDS * scale))
            ours: list[float] = []
            on_commit: list[float] = []
            for _ in range(ROUNDS):
                on_commit += _clock(clocked.delay_on_commit, count, rate)
                ours += _clock(clocked.delay_in_transaction, count, rate)
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                title, note = f"celery: commit to task, {rate}/s: {name}", f"on_commit: {latency.words(on_commit)}"
                value, bound = percentile(ours, share), percentile(on_commit, share)
                found.append(Figure(title, value, "ms", None, at_most=True, bound=bound, note=note))
    return found


def _clock(send: Callable[[int], Any], count: int, per_second: float) -> list[float]:
    """Return the milliseconds from each commit to the start of its task."""
    committed: dict[int, float] = {}

    def send_one(number: int) -> int:
        with transaction.atomic():
            transaction.on_commit(lambda: committed.update({number: time.time()}))  # before the send of delay_on_commit
            send(number)
        return number

    latency.clock_each(send_one, count, per_second)
    with connection.cursor() as cursor:
        cursor.execute("SELECT number, handled_at FROM bench_handled WHERE number >= %s", [latency.FIRST])
        return [(handled - committed[number]) * 1000 for number, handled in cursor.fetchall()]

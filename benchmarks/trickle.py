"""
The lone message: a steady 100 a second, one of each transaction, through a relay and a consumer that are processes of their own.

CPU is that of a process, all its threads, and of the backends of its connections; the backends that serve the embedded broker
count with the consumer, whoever speaks to it. Transactions are what the server counts, less what is done by the clock.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path

from django.db import connection, transaction

from benchmarks.consumers import ONE, OTHER, TABLE, write_one
from benchmarks.figure import Figure
from benchmarks.models import Order
from benchmarks.processes import command, count, wait_until
from benchmarks.publish import TABLE as ORDERS
from outbox import database, publish_raw

A_SECOND = 100
WARM_UP = 50  # messages: connections are open, statements are prepared
ROUNDS = 3
ONE_PHASE, TWO_PHASE = "bench-consumed", "bench-consumed-two-phase"
RELAY = ("outbox_relay", "--broker", "default")
HANDLED = "SELECT count(*) FROM bench_consumed"
PROCESSES = "SELECT count(*) FROM outbox_process WHERE beat_at > clock_timestamp() - interval '3 s'"
BACKENDS = """
SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = current_database()
AND (application_name IN ('outbox relay', 'outbox listener')) = %s AND pid <> pg_backend_pid()
"""
COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
SETTLED_SECONDS = 2.5  # a backend says once a second what it has done
EMPTY = """
TRUNCATE bench_consumed, outbox_ticket, outbox_batch, outbox_process, outbox_wakeup, outbox_inbox, outbox_embedded_half,
    outbox_embedded_message, outbox_embedded_queue, outbox_embedded_offset, outbox_embedded_delivery
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a message costs: CPU microseconds of publisher, relay and consumer; transactions of the latter two."""

    publisher: float = 0
    relay: float = 0
    consumer: float = 0
    transactions: float = 0


def measure(scale: float) -> list[Figure]:
    """Compare the ways of a lone message with the transaction that publishes it, and with a bare loop of its handler's work."""
    seconds = max(2.0, 8 * scale)
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
        cursor.execute(ORDERS)
    one, two, relays, groups, bare = _medians(
        lambda: _trickle(ONE_PHASE, seconds),
        lambda: _trickle(TWO_PHASE, seconds),
        lambda: _trickle(ONE_PHASE, seconds, relays=2),
        lambda: _trickle(ONE_PHASE, seconds, groups=(ONE, OTHER)),
        lambda: _bare(seconds),
    )
    second_relay, second_group = relays.relay - one.relay, groups.consumer - one.consumer
    return [
        Figure("lone message, one-phase: transactions", one.transactions, "", 7, at_most=True),
        Figure("lone message, two-phase: transactions", two.transactions, "", 10, at_most=True),
        Figure("lone message, one-phase: relay", one.relay, "us", 0.4, at_most=True, bound=one.publisher),
        Figure("lone message, two-phase: relay", two.relay, "us", None, at_most=True, bound=two.publisher),
        Figure("lone message: consumer", one.consumer, "us", 1.5, at_most=True, bound=bare.consumer),
        Figure("lone message: a second relay adds", second_relay, "us", 0.1, at_most=True, bound=one.relay),
        Figure("lone message: a second group adds", second_group, "us", 1, at_most=True, bound=bare.consumer),
    ]


def _medians(*subjects: Callable[[], Cost]) -> list[Cost]:
    seen: list[list[Cost]] = [[] for _ in subjects]
    for _ in range(ROUNDS):
        for subject, costs in zip(subjects, seen, strict=True):
            costs.append(subject())
    return [Cost(*map(statistics.median, zip(*map(astuple, costs), strict=True))) for costs in seen]


def _trickle(topic: str, seconds: float, *, relays: int = 1, groups: Sequence[str] = (ONE,)) -> Cost:
    total = int(A_SECOND * seconds)
    with connection.cursor() as cursor:
        cursor.execute(EMPTY)
    mine = {database.raw("default").info.backend_pid}
    with ExitStack() as stack:
        _publish(topic, WARM_UP)
        hosts = [stack.enter_context(command(*RELAY)) for _ in range(relays)]
        arguments = [argument for group in groups for argument in ("--group", group)]
        host = stack.enter_context(command("outbox_consume", *arguments))
        wait_until(lambda: count(PROCESSES) == relays + len(groups), 30, "relays and consumer")
        wait_until(lambda: count(HANDLED) == WARM_UP * len(groups), 30, "what waited")
        _at_a_pace(lambda _: _publish(topic, 1), A_SECOND)
        by_the_clock = _commits_while(lambda: time.sleep(seconds))
        clocks = [
            _Clock([os.getpid()], lambda: mine),
            _Clock([host.pid for host in hosts], lambda: _backends(of_relays=True)),
            _Clock([host.pid], lambda: _backends(of_relays=False)),
        ]
        cpu = []

        def publish() -> None:
            before = [clock() for clock in clocks]
            _at_a_pace(lambda _: _publish(topic, 1), total)
            cpu.extend((clock() - began) / total * 1e6 for clock, began in zip(clocks, before, strict=True))

        commits = _commits_while(publish)
        wait_until(lambda: count(HANDLED) == (WARM_UP + A_SECOND + total) * len(groups), 30, "all messages handled")
    return Cost(*cpu, transactions=(commits - by_the_clock) / total - 1)


def _bare(seconds: float) -> Cost:
    """Run a loop of the handler's transactions, at the same pace."""
    total = int(A_SECOND * seconds)

    def handle(number: int) -> None:
        with transaction.atomic():
            write_one({"number": number})

    clock = _Clock([os.getpid()], lambda: {database.raw("default").info.backend_pid})
    began = clock()
    _at_a_pace(handle, total)
    return Cost(consumer=(clock() - began) / total * 1e6)


def _publish(topic: str, messages: int) -> None:
    for number in range(messages):
        with transaction.atomic():
            order = Order.objects.create(customer="17850", total="15.30")
            publish_raw(topic, {"number": number, "padding": "x" * 180}, key=str(order.pk))


def _at_a_pace(act: Callable[[int], None], total: int) -> None:
    began = time.monotonic()
    for number in range(total):
        act(number)
        time.sleep(max(0.0, began + (number + 1) / A_SECOND - time.monotonic()))


def _backends(*, of_relays: bool) -> set[int]:
    with connection.cursor() as cursor:
        cursor.execute(BACKENDS, [of_relays])
        return {pid for (pid,) in cursor.fetchall()}


def _commits_while(act: Callable[[], object]) -> int:
    time.sleep(SETTLED_SECONDS)
    before = count(COMMITS)
    act()
    time.sleep(SETTLED_SECONDS)
    return count(COMMITS) - before


class _Clock:
    """Reads the CPU seconds that processes, all their threads, and backends have used. Linux, server on the same machine."""

    def __init__(self, processes: Sequence[int], backends: Callable[[], set[int]]) -> None:
        self._pids = [*processes, *backends()]

    def __call__(self) -> float:
        tasks = [task for pid in self._pids for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

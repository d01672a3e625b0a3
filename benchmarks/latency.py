"""
From the commit of the publishing transaction to the broker, and to the handler.

To the broker: a long-running relay in a process of its own calls `send`; beside it, in turn, a bare loop does. To the handler:
long-running relay, embedded broker and a consumer in a process of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import Popen
from typing import TypeVar

from django.db import connection, transaction

from benchmarks import bare_relay, sent_times
from benchmarks.clocked_broker import VARIABLE
from benchmarks.figure import Figure, interleaved, percentile
from benchmarks.history import empty
from benchmarks.messages import Clocked, ClockedAtBroker, ClockedOnePhase, ClockedOnKafka, ClockedOnRabbitMQ, ClockedOnRocketMQ
from benchmarks.processes import command, count, is_up, module, wait_until
from outbox import database, publish

TABLE = "DROP TABLE IF EXISTS bench_handled; CREATE TABLE bench_handled (number int PRIMARY KEY, handled_at float8)"
UNSENT = "SELECT (SELECT count(*) FROM outbox_ticket) + (SELECT count(*) FROM outbox_batch WHERE state IN (0, 1, 2))"
WARM_UP = 30  # all connections are open, all code is loaded, all statements are prepared
FIRST = 1000  # the number of the first message that counts
PACE = 50  # messages in a second, where nothing else is asked for
SLOW, FAST = 10, 200
ROUNDS = 3

Kind = type[Clocked | ClockedOnePhase | ClockedOnKafka | ClockedOnRabbitMQ | ClockedOnRocketMQ]
Name = TypeVar("Name", int, str)  # of a message


def measure(scale: float) -> list[Figure]:
    """Compare relay and bare loop at both rates, then handler and broker at the slow one."""
    with database.connect("default") as own:
        empty(own)
    slow, fast = max(10, int(40 * scale)), max(50, int(600 * scale))
    taken: dict[str, list[float]] = {name: [] for name in ("10", "200", "one-phase", "two-phase")}
    to_broker, bare, to_broker_fast, bare_fast, one_phase, two_phase = interleaved(
        ROUNDS,
        lambda: _median(_relayed(slow, SLOW), taken["10"]),
        lambda: _median(_looped(slow, SLOW), []),
        lambda: _median(_relayed(fast, FAST), taken["200"]),
        lambda: _median(_looped(fast, FAST), []),
        lambda: _median(_handled(ClockedOnePhase, slow), taken["one-phase"]),
        lambda: _median(_handled(Clocked, slow), taken["two-phase"]),
    )
    return [
        _figure(f"commit to broker, {SLOW}/s: p50", to_broker, 1.5, bare, taken["10"]),
        _figure(f"commit to broker, {FAST}/s: p50", to_broker_fast, 1.5, bare_fast, taken["200"]),
        _figure(f"commit to handler, one-phase, {SLOW}/s: p50", one_phase, 2, to_broker, taken["one-phase"]),
        _figure(f"commit to handler, two-phase, {SLOW}/s: p50", two_phase, 2, to_broker, taken["two-phase"]),
    ]


def clock(kind: Kind, messages: int, per_second: float = PACE) -> list[float]:
    """Return the milliseconds that each message took to its handler, while relay and consumer run."""

    def publish_one(number: int) -> int:
        with transaction.atomic():
            publish(kind(number=number))
        return number

    return clock_each(publish_one, messages, per_second)


def clock_each(publish_one: Callable[[int], int], messages: int, per_second: float) -> list[float]:
    """Return the same for messages that a function publishes by their numbers."""
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    _publish_and_wait(publish_one, range(WARM_UP), per_second)
    committed = _publish_and_wait(publish_one, range(FIRST, FIRST + messages), per_second)
    with connection.cursor() as cursor:
        cursor.execute("SELECT number, handled_at FROM bench_handled WHERE number >= %s", [FIRST])
        return [(handled - committed[number]) * 1000 for number, handled in cursor.fetchall()]


def words(taken: list[float]) -> str:
    """Return the other percentiles."""
    return f"p95 {percentile(taken, 0.95):.1f} ms, p99 {percentile(taken, 0.99):.1f} ms, {len(taken)} messages"


def _figure(name: str, value: float, target: float, bound: float, taken: list[float]) -> Figure:
    return Figure(name, value, "ms", target, at_most=True, bound=bound, note=words(taken))


def _median(taken: list[float], all_taken: list[float]) -> float:
    all_taken += taken
    return percentile(taken, 0.5)


def _relayed(messages: int, per_second: float) -> list[float]:
    """Return the milliseconds that each message took to the broker, by a relay."""

    def publish_one(number: int) -> str:
        with transaction.atomic():
            return str(publish(ClockedAtBroker(number=number)).message_id)

    return _timed(
        lambda path: command("outbox_relay", "--broker", "clocked", **{VARIABLE: str(path)}),
        is_up,
        publish_one,
        lambda: not count(UNSENT),
        messages,
        per_second,
    )


def _looped(messages: int, per_second: float) -> list[float]:
    """Return the milliseconds that each message took, by the bare loop."""
    with connection.cursor() as cursor:
        cursor.execute(bare_relay.TABLE)

    def publish_one(number: int) -> str:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(bare_relay.PUBLISH, [b'{"number":%d}' % number])
            return str(cursor.fetchone()[0])

    return _timed(
        lambda path: module("benchmarks.bare_relay", os.environ["DATABASE_URL"], str(path)),
        lambda _: count("SELECT count(*) FROM bench_bare_ready") > 0,
        publish_one,
        lambda: not count("SELECT count(*) FROM bench_bare_waiting"),
        messages,
        per_second,
    )


def _timed(
    start: Callable[[Path], AbstractContextManager[Popen[bytes]]],
    is_ready: Callable[[Popen[bytes]], bool],
    publish_one: Callable[[int], str],
    is_done: Callable[[], bool],
    messages: int,
    per_second: float,
) -> list[float]:
    """
    Return the milliseconds from each commit to its hand-over, in a process that writes the times to a file when it ends.

    Args:
        start: takes the file.
        publish_one: takes a number, and returns by which name the process notes the message.
    """
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        path = Path(folder, "times")
        with start(path) as process:
            wait_until(lambda: is_ready(process), 30, "the process")
            _at_rate(publish_one, range(WARM_UP), max(per_second, PACE))
            wait_until(is_done, 60, "the first messages sent")
            committed = _at_rate(publish_one, range(messages), per_second)
            wait_until(is_done, 60, "all messages sent")
        sent = sent_times.read(path)
    return [(sent[name] - at) * 1000 for name, at in committed.items()]


def _handled(kind: Kind, messages: int) -> list[float]:
    """Return the milliseconds that each message took to its handler, by relay and consumer."""
    with command("outbox_relay", "--broker", "default") as relay, command("outbox_consume", "--group", "bench"):
        wait_until(lambda: is_up(relay), 30, "a relay")
        return clock(kind, messages, SLOW)


def _publish_and_wait(publish_one: Callable[[int], int], numbers: range, per_second: float) -> Mapping[int, float]:
    committed = _at_rate(publish_one, numbers, per_second)
    arrived = "SELECT count(*) FROM bench_handled WHERE number BETWEEN %s AND %s"
    wait_until(lambda: count(arrived, numbers[0], numbers[-1]) == len(numbers), 60, "all messages handled")
    return committed


def _at_rate(publish_one: Callable[[int], Name], numbers: range, per_second: float) -> dict[Name, float]:
    """Publish message after message; return when each was committed, by its name."""
    committed = {}
    began = time.monotonic()
    for place, number in enumerate(numbers, start=1):
        name = publish_one(number)
        committed[name] = time.time()
        time.sleep(max(0.0, began + place / per_second - time.monotonic()))
    return committed

"""
Consuming from the embedded broker, message by message and many at once, against a bare loop of the same handler transactions.

CPU is that of this process and of the backend that serves its Django connection; the bare loop's is measured the same way.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import psycopg
from django.db import connection, transaction

from benchmarks.consumers import MANY, ONE, TABLE, write_one
from benchmarks.cpu import CpuClock
from benchmarks.figure import Figure, interleaved
from outbox import conf, database
from outbox.brokers.base import Outgoing
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.message import Header

TOPIC = "bench-consumed"
EMPTY = """
TRUNCATE outbox_embedded_message, outbox_embedded_queue, outbox_embedded_offset, outbox_embedded_delivery, outbox_inbox
"""
A_SECOND = 100
SECONDS = 5


def measure(scale: float) -> list[Figure]:
    """Compare the ways to consume, then count the questions that a lone message costs."""
    count = max(200, int(5_000 * scale))
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    bare, one, many = interleaved(5, lambda: _bare(count), lambda: _consume(ONE, count), lambda: _consume(MANY, count))
    rates = interleaved(3, lambda: count / _seconds(ONE, count), lambda: count / _seconds(MANY, count))
    calls = _calls_per_message()
    return [
        Figure("consume one by one: CPU per message", one, "us", 1.5, at_most=True, bound=bare),
        Figure("consume many at once: CPU per message", many, "us", 1.5, at_most=True, bound=bare),
        Figure("consume many at once: messages", rates[1], "/s", 5, at_most=False, bound=rates[0]),
        Figure(f"consume {A_SECOND}/s: round trips per message", calls, "", None, at_most=True),
    ]


def _bare(count: int) -> float:
    clock = CpuClock(database.raw("default"))
    began = clock()
    for number in range(count):
        with transaction.atomic():
            write_one({"number": number})
    return (clock() - began) / count * 1e6


def _consume(name: str, count: int) -> float:
    _fill(count)
    clock = CpuClock(database.raw("default"))
    began = clock()
    _drain(name, count)
    return (clock() - began) / count * 1e6


def _seconds(name: str, count: int) -> float:
    _fill(count)
    began = time.perf_counter()
    _drain(name, count)
    return time.perf_counter() - began


def _drain(name: str, count: int) -> None:
    with closing(Worker(group(name), "default")) as worker:
        while worker.tally.handled < count:
            worker.step(timedelta(seconds=1))


def _fill(count: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(EMPTY)
    with closing(conf.make_broker("default")) as broker:
        for first in range(0, count, 500):
            broker.send([_message(number) for number in range(first, min(first + 500, count))])


def _message(number: int) -> Outgoing:
    body = json.dumps({"number": number, "padding": "x" * 180}).encode()
    return Outgoing(str(uuid.uuid4()), TOPIC, body, headers={Header.CONTENT_TYPE: "application/json"})


def _calls_per_message() -> float:
    """Return how often the consumer's thread waits for PostgreSQL for each of the messages that come one by one."""
    _fill(0)
    total = A_SECOND * SECONDS
    sender = threading.Thread(target=_send_steadily, args=(total,))
    with closing(Worker(group(ONE), "default")) as worker:
        worker.step(timedelta(0))
        with _counted_calls() as calls:
            sender.start()
            while worker.tally.handled < total:
                worker.step(timedelta(seconds=1))
            sender.join()
            return calls[0] / total


def _send_steadily(total: int) -> None:
    began = time.monotonic()
    with closing(conf.make_broker("default")) as broker:
        for number in range(total):
            broker.send([_message(number)])
            time.sleep(max(0.0, began + (number + 1) / A_SECOND - time.monotonic()))


@contextmanager
def _counted_calls() -> Iterator[list[int]]:
    """Count the statements that this thread sends, over whatever connection; waiting to be notified is none."""
    me, calls = threading.get_ident(), [0]
    execute = psycopg.Cursor.execute

    def count(cursor: Any, *arguments: Any, **named: Any) -> Any:
        calls[0] += threading.get_ident() == me
        return execute(cursor, *arguments, **named)

    psycopg.Cursor.execute = count  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        psycopg.Cursor.execute = execute  # type: ignore[method-assign]

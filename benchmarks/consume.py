"""
Consuming from the embedded broker, message by message and many at once, against a bare loop of the same handler transactions.

CPU is that of this process, of the backend that serves its Django connection and of the embedded broker's backend; the bare loop,
which has no broker, is measured the same way. Beside it stands the least that any inbox costs: the bare loop and a plain insert
of the inbox row.
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

from benchmarks.consumers import MANY, ONE, TABLE, handle_bare, handle_with, write_one
from benchmarks.cpu import CpuClock
from benchmarks.figure import Figure, interleaved
from benchmarks.processes import count as count_rows
from benchmarks.processes import wait_until
from outbox import conf, database
from outbox.brokers.base import Outgoing
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.message import Header

TOPIC = "bench-consumed"
EMPTY = """
TRUNCATE outbox_embedded_message, outbox_embedded_queue, outbox_embedded_offset, outbox_embedded_delivery, outbox_inbox
"""
BROKER = "FROM pg_stat_activity WHERE application_name = 'outbox embedded broker'"
A_SECOND = 100
SECONDS = 5


def measure(scale: float) -> list[Figure]:
    """Compare the ways to consume, then count the queries for a single message."""
    count = max(200, int(5_000 * scale))
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    bare, least, one, many = interleaved(
        5, lambda: _bare(count), lambda: _bare_with_inbox(count), lambda: _consume(ONE, count), lambda: _consume(MANY, count)
    )
    rates = interleaved(3, lambda: _rate(ONE, count), lambda: _rate(MANY, count))
    calls = _calls_per_message()
    return [
        Figure("bare loop with an inbox row: CPU per message", least, "us", None, at_most=True, bound=bare),
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


def _bare_with_inbox(count: int) -> float:
    with connection.cursor() as cursor:
        cursor.execute(EMPTY)
    clock = CpuClock(database.raw("default"))
    began = clock()
    for number in range(count):
        handle_bare(str(uuid.uuid4()), {"number": number})
    return (clock() - began) / count * 1e6


def _consume(name: str, count: int) -> float:
    with _worker(name) as worker:
        clock = CpuClock(database.raw("default"), _broker_backend())
        _send(count)
        began = clock()
        handle_with(worker, count)
        return (clock() - began) / count * 1e6


def _rate(name: str, count: int) -> float:
    with _worker(name) as worker:
        _send(count)
        return handle_with(worker, count)


@contextmanager
def _worker(name: str) -> Iterator[Worker]:
    """Open an idle worker."""
    with connection.cursor() as cursor:
        cursor.execute(EMPTY)
    with closing(Worker(group(name), "default")) as worker:
        worker.step(timedelta(0))
        yield worker


def _broker_backend() -> int:
    """Return the process id of the only connection of the embedded broker; closed ones may take a moment to disappear."""
    wait_until(lambda: count_rows(f"SELECT count(*) {BROKER}") == 1, 10, "the broker's connections closed")
    return count_rows(f"SELECT pid {BROKER}")


def _send(count: int) -> None:
    with closing(conf.make_broker("default")) as broker:
        for first in range(0, count, 500):
            broker.send([_message(number) for number in range(first, min(first + 500, count))])


def _message(number: int) -> Outgoing:
    body = json.dumps({"number": number, "padding": "x" * 180}).encode()
    return Outgoing(str(uuid.uuid4()), TOPIC, body, headers={Header.CONTENT_TYPE: "application/json"})


def _calls_per_message() -> float:
    """Return the consumer's round trips to PostgreSQL for each message, one at a time."""
    total = A_SECOND * SECONDS
    sender = threading.Thread(target=_send_steadily, args=(total,))
    with _worker(ONE) as worker, _counted_calls() as calls:
        sender.start()
        handle_with(worker, total)
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
    """Count the statements that this thread sends over any connection, without waits for notifications."""
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

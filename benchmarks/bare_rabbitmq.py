"""
The least that brings a row to a handler over RabbitMQ: plain psycopg and py-amqp.

    python -m benchmarks.bare_rabbitmq relay CONNINFO HOST:PORT      told of new rows; one confirm for each group of rows
    python -m benchmarks.bare_rabbitmq consume CONNINFO HOST:PORT    writes the row of the handler, then acknowledges

No fence, no numbers, no inbox. Both run until SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from typing import Any

import amqp
import psycopg

from benchmarks.bare_relay import CLAIM, DELETE, POLL_SECONDS

QUEUE = "bench-bare"
PREFETCH = 100
READY = "INSERT INTO bench_bare_ready VALUES (%s)"
HANDLE = "INSERT INTO bench_handled (number, handled_at) VALUES (%s, %s)"


def relay(connection: psycopg.Connection, amqp_connection: amqp.Connection) -> None:
    """Publish waiting rows, and delete them when they are confirmed."""
    channel = amqp_connection.channel()
    channel.confirm_select()
    waits_for = [0]

    def on_ack(tag: int, multiple: bool) -> None:
        waits_for[0] = 0 if multiple else waits_for[0] - 1

    events: dict[str, Any] = channel.events  # type: ignore[attr-defined]  # the stubs lack it
    events["basic_ack"].add(on_ack)
    connection.execute("LISTEN bench_bare")
    connection.execute(READY, [connection.info.backend_pid])
    while True:
        with connection.transaction():
            rows = connection.execute(CLAIM).fetchall()
            waits_for[0] = len(rows)
            for _, body in rows:
                channel.basic_publish(amqp.Message(body, delivery_mode=2), routing_key=QUEUE, mandatory=True)
            while waits_for[0] > 0:
                amqp_connection.drain_events(timeout=10)
            if rows:
                connection.execute(DELETE, [[number for number, _ in rows]])
        if not rows:
            for _ in connection.notifies(timeout=POLL_SECONDS, stop_after=1):
                pass


def consume(connection: psycopg.Connection, amqp_connection: amqp.Connection) -> None:
    """Handle messages: a row with the number and the time, committed, then the acknowledgement."""
    channel = amqp_connection.channel()
    channel.basic_qos(0, PREFETCH, False)

    def handle(message: amqp.Message) -> None:
        began = time.time()
        connection.execute(HANDLE, [int(message.body), began])
        channel.basic_ack(message.delivery_info["delivery_tag"])

    channel.basic_consume(QUEUE, callback=handle)
    connection.execute(READY, [connection.info.backend_pid])
    while True:
        with suppress(TimeoutError):
            amqp_connection.drain_events(timeout=POLL_SECONDS)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    role, conninfo, address = sys.argv[1:]
    with psycopg.connect(conninfo, autocommit=True) as own, amqp.Connection(address) as broker:
        {"relay": relay, "consume": consume}[role](own, broker)

"""From commit to handler over RabbitMQ: long-running relay and consumer, beside a bare loop and a bare consumer, in turn."""

from __future__ import annotations

import os

import amqp
from django.db import connection, transaction

from benchmarks import bare_rabbitmq, bare_relay, latency
from benchmarks.figure import Figure, percentile
from benchmarks.messages import ClockedOnRabbitMQ
from benchmarks.processes import command, count, is_up, module, wait_until

RATES = (10, 100)
SECONDS = 10
ROUNDS = 3


def measure(address: str, scale: float) -> list[Figure]:
    """Compare both at each rate. The settings have the broker already."""
    with amqp.Connection(address) as client:
        client.channel().queue_declare(bare_rabbitmq.QUEUE, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
    found = []
    for rate in RATES:
        messages = max(20, int(rate * SECONDS * scale))
        ours: list[float] = []
        bare: list[float] = []
        for _ in range(ROUNDS):
            bare += _bare(address, messages, rate)
            ours += _ours(messages, rate)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            title, note = f"RabbitMQ: commit to handler, {rate}/s: {name}", f"bare: {latency.words(bare)}"
            found.append(
                Figure(title, percentile(ours, share), "ms", None, at_most=True, bound=percentile(bare, share), note=note)
            )
    return found


def _ours(messages: int, per_second: float) -> list[float]:
    with command("outbox_relay", "--broker", "rabbitmq") as relay, command("outbox_consume", "--group", "bench-rabbitmq"):
        wait_until(lambda: is_up(relay), 30, "a relay")
        return latency.clock(ClockedOnRabbitMQ, messages, per_second)


def _bare(address: str, messages: int, per_second: float) -> list[float]:
    def publish_one(number: int) -> int:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(bare_relay.PUBLISH, [b"%d" % number])
        return number

    with connection.cursor() as cursor:
        cursor.execute(bare_relay.TABLE)
    url, name = os.environ["DATABASE_URL"], "benchmarks.bare_rabbitmq"
    with module(name, "relay", url, address), module(name, "consume", url, address):
        wait_until(lambda: count("SELECT count(*) FROM bench_bare_ready") == 2, 30, "the bare loop and consumer")
        return latency.clock_each(publish_one, messages, per_second)

"""The handlers of the benchmarks."""

from __future__ import annotations

import time
from datetime import timedelta

from django.conf import settings
from django.db import connection, transaction

from benchmarks.messages import Clocked, ClockedOnePhase, ClockedOnKafka, ClockedOnRabbitMQ, ClockedOnRocketMQ
from outbox import consumer, database
from outbox.consuming.worker import Worker

INSERT = "INSERT INTO bench_handled (number, handled_at) VALUES (%s, %s)"


@consumer(Clocked, ClockedOnePhase, group="bench")
def note(message: Clocked | ClockedOnePhase | ClockedOnKafka | ClockedOnRabbitMQ | ClockedOnRocketMQ, context: object) -> None:
    """Record the start of the handler."""
    began = time.time()
    with connection.cursor() as cursor:
        cursor.execute(INSERT, [message.number, began])


ONE, OTHER, MANY = "bench-one", "bench-other", "bench-many"
TABLE = "DROP TABLE IF EXISTS bench_consumed; CREATE TABLE bench_consumed (number int, note text)"
WRITE = "INSERT INTO bench_consumed (number, note) VALUES (%s, %s)"
INBOX = "INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic) VALUES (%s, %s, %s, '', %s)"


@consumer(topic="bench-consumed", group=ONE)
def consume_one(message: dict[str, int], context: object) -> None:
    """Write a row."""
    write_one(message)


consumer(topic="bench-consumed-two-phase", group=ONE)(consume_one)
consumer(topic="bench-consumed", group=OTHER)(consume_one)


@consumer(topic="bench-consumed", group=MANY, batch_size=100)
def consume_many(messages: list[dict[str, int]], contexts: object) -> None:
    """Write a row for each."""
    write_many(messages)


def write_one(message: dict[str, int]) -> None:
    """Do the work of a handler."""
    with connection.cursor() as cursor:
        cursor.execute(WRITE, [message["number"], "written"])


def handle_bare(message_id: str, message: dict[str, int]) -> None:
    """Do what every consumer with an inbox does: a row of the inbox, by raw SQL, and the handler's work in one transaction."""
    with transaction.atomic():
        with database.bound_cursor("default") as cursor:
            cursor.execute(INBOX, ["bench-bare", message_id, message_id, "bench-consumed"])
        write_one(message)


def handle_with(worker: Worker, how_many: int) -> float:
    """Have a worker handle more messages, a few more at most; return how many in a second."""
    began, before = time.perf_counter(), worker.counts.handled
    while worker.counts.handled < before + how_many:
        worker.step(timedelta(seconds=1))
    return (worker.counts.handled - before) / (time.perf_counter() - began)


def write_many(messages: list[dict[str, int]]) -> None:
    """Do the same for many."""
    with connection.cursor() as cursor:
        cursor.executemany(WRITE, [[message["number"], "written"] for message in messages])


if "rocketmq" in settings.OUTBOX["BROKERS"]:
    consumer(ClockedOnRocketMQ, group="bench-rocketmq")(note)

if "kafka" in settings.OUTBOX["BROKERS"]:
    consumer(ClockedOnKafka, group="bench-kafka")(note)

if "rabbitmq" in settings.OUTBOX["BROKERS"]:
    consumer(ClockedOnRabbitMQ, group="bench-rabbitmq")(note)

"""Celery's tasks on a RabbitMQ: confirmed one by one and by the batch, relayed; what the call costs, and when a task starts."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import amqp
from celery import Celery
from django.conf import settings
from django.db import connection, transaction
from django.test import override_settings

from benchmarks import celery_latency
from benchmarks.figure import Figure, interleaved, percentile
from benchmarks.models import TABLE, Order
from benchmarks.settings import with_rabbitmq
from outbox import conf
from outbox.brokers.base import Outgoing, SendStatus
from outbox.celery import CeleryBroker, OutboxTask
from outbox.celery.canvas import CapturingProducer, capture
from outbox.celery.stored import TOPIC, decode
from outbox.relay.hosts import RelayTarget, run_once
from project.servers.rabbitmq import RabbitMQ

BATCH = 500
ROUNDS = 5
TIME = timedelta(minutes=5)
AT_ONCE = timedelta()

app = Celery("bench", set_as_current=False, task_cls=OutboxTask)
unconfirmed = Celery("bench-unconfirmed", set_as_current=False, task_cls=OutboxTask)  # as Celery is set up by default


@app.task(name="bench.task", ignore_result=True, shared=False)
def task(order: int, customer: str, total: str) -> None: ...


@unconfirmed.task(name="bench.task", ignore_result=True, shared=False)
def task_unconfirmed(order: int, customer: str, total: str) -> None: ...


ARGUMENTS = (17, "17850", "15.30")


def measure(scale: float) -> list[Figure]:
    """Compare sends in turns, in one run, on one server."""
    count = max(BATCH, int(5000 * scale))
    broker = {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": {"APP": f"{__name__}.app"}}
    outbox = {**settings.OUTBOX, "BROKERS": {**settings.OUTBOX["BROKERS"], "celery": broker}}
    with tempfile.TemporaryDirectory() as folder, RabbitMQ(Path(folder)) as server, override_settings(OUTBOX=outbox):
        app.conf.broker_url = unconfirmed.conf.broker_url = server.url
        app.conf.broker_transport_options = {"confirm_publish": True}
        alone, batched, bare, relayed = interleaved(
            ROUNDS,
            lambda: _rate(_send_alone, count // 5),
            lambda: _rate(_send_batched, count),
            lambda: _rate(_BareProducer(server.port).send, count),
            lambda: _relay(count),
        )
        confirmed, on_commit, in_transaction = _measure_calls(max(20, int(300 * scale)))
        latencies = _latencies(server.address, scale)
    return [
        Figure("celery: confirmed by batch, beside each", batched, "/s", 1.0, at_most=False, bound=alone),
        Figure("celery: confirmed by batch, beside py-amqp", batched, "/s", 0.8, at_most=False, bound=bare),
        Figure("celery: through a relay, beside each", relayed, "/s", None, at_most=False, bound=alone),
        Figure("celery: p50 of row and task, by on_commit", in_transaction, "us", None, at_most=True, bound=on_commit),
        Figure("celery: the same, on_commit confirmed", in_transaction, "us", None, at_most=True, bound=confirmed),
        *latencies,
    ]


def _latencies(address: str, scale: float) -> list[Figure]:
    os.environ["BENCH_RABBITMQ"] = address  # for the processes
    try:
        with override_settings(OUTBOX=with_rabbitmq(address)):
            return celery_latency.measure(scale)
    finally:
        del os.environ["BENCH_RABBITMQ"]


def _rate(send: Callable[[int], None], count: int) -> float:
    began = time.perf_counter()
    send(count)
    return count / (time.perf_counter() - began)


def _send_alone(count: int) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(count):
            task.apply_async(ARGUMENTS, producer=producer)


def _send_batched(count: int) -> None:
    broker = conf.make_broker("celery")
    assert isinstance(broker, CeleryBroker)
    body = _encoded()
    for _ in range(0, count, BATCH):
        results = broker.send([Outgoing(uuid.uuid4().hex, TOPIC, body) for _ in range(BATCH)])
        assert {one.status for one in results} == {SendStatus.ACCEPTED}
    broker.close()


def _encoded() -> bytes:
    producer = CapturingProducer(app)
    capture(task.s(*ARGUMENTS), producer)
    return producer.captured[0].body


class _BareProducer:
    """The least that sends Celery's message to a RabbitMQ with confirms by the batch."""

    def __init__(self, port: int) -> None:
        self._connection = amqp.Connection(f"127.0.0.1:{port}")
        self._acked = 0

    def send(self, count: int) -> None:
        """Send messages, and wait for each batch."""
        self._connection.connect()
        channel: Any = self._connection.channel()
        channel.queue_declare("celery", durable=True, auto_delete=False)
        channel.confirm_select()
        channel.events["basic_ack"].add(self._note)
        stored = decode(_encoded())
        headers, body = stored.read_headers(), stored.payload.decode()
        for sent in range(BATCH, count + 1, BATCH):
            for _ in range(BATCH):
                channel.basic_publish(
                    amqp.Message(body, application_headers=headers, delivery_mode=2), "", "celery", mandatory=True
                )
            while self._acked < sent:
                self._connection.drain_events(timeout=10)
        self._connection.close()

    def _note(self, tag: int, multiple: bool) -> None:
        self._acked = tag if multiple else self._acked + 1


def _relay(count: int) -> float:
    for _ in range(0, count, BATCH):
        with transaction.atomic():
            for _ in range(BATCH):
                task.delay_in_transaction(*ARGUMENTS)
    began = time.perf_counter()
    done = run_once(RelayTarget("default", "celery"), note="bench", at_most=TIME, idle_timeout=AT_ONCE)
    assert done.sent >= count, done
    return count / (time.perf_counter() - began)


def _measure_calls(count: int) -> list[float]:
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    subjects = (task.delay_on_commit, task_unconfirmed.delay_on_commit, task.delay_in_transaction)
    rounds = [lambda call=call: _p50(call) for call in subjects]  # type: ignore[misc]
    interleaved(3, *rounds)  # warm
    return interleaved(count, *rounds)


def _p50(call: Callable[..., Any]) -> float:
    seen = []
    for _ in range(5):
        began = time.perf_counter()
        with transaction.atomic():
            Order.objects.create(customer="17850", total="15.30")
            call(*ARGUMENTS)
        seen.append((time.perf_counter() - began) * 1e6)
    return percentile(seen, 0.5)

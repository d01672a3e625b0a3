"""
A real RabbitMQ, started for it: relay and adapter against a bare client that awaits its confirms by the batch, and the time from
commit to handler.

In bulk all publish messages of 200 bytes, with the headers of CloudEvents, to one quorum queue, in batches of 500, and in turn,
so that noise hits all alike. The relay reads its messages from the database and marks them there, which the bare client does not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import amqp
from django.test.utils import override_settings

from benchmarks import rabbitmq_latency
from benchmarks.consumers import ONE, TABLE, handle_bare, handle_with
from benchmarks.figure import Figure, interleaved
from benchmarks.history import empty, fill
from benchmarks.settings import OUTBOX, with_rabbitmq
from outbox import conf, database
from outbox.brokers.base import Outgoing, SendStatus
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.relay.hosts import PLANNER_SETTINGS
from outbox.relay.lane import take_lane
from outbox.relay.rounds import Relay
from outbox.topics import topic_id, write_topics
from project.servers.program import ServerError
from project.servers.rabbitmq import RabbitMQ

ALIAS, TOPIC = "rabbitmq", "bench-consumed"
QUEUE = f"{TOPIC}:{ONE}"
BATCH = 500
BODY = b"x" * 200
HEADERS = {  # what a message of the relay carries
    "ce-id": "0190c1f8-0000-7000-8000-000000000000",
    "ce-source": "urn:uuid:0190c1f8-0000-7000-8000-000000000000",
    "ce-specversion": "1.0",
    "ce-type": "BenchOrder",
    "ce-typeversion": "1",
    "ce-tag": "placed",
    "ce-time": "2026-01-01T00:00:00Z",
    "ce-subject": "1",
    "ce-lane": "1",
    "ce-number": "1",
    "content-type": "application/json",
}
ROUNDS = 7
CONSUMED_IN = 5  # rounds
PREFETCH = 100  # of the bare consumer


def measure(scale: float) -> list[Figure]:
    """Compare the ways to publish, then consume with an inbox; nothing where there is no RabbitMQ to be had, which is said."""
    count = int(10_000 * scale)
    try:
        with _outbox() as address, database.connect("default", settings=PLANNER_SETTINGS) as connection:
            connection.execute(TABLE)
            with closing(conf.make_broker(ALIAS)) as broker, amqp.Connection(address) as bare:
                relay = Relay(connection, broker, take_lane(connection, lanes=16))
                broker.send([_message(0)])  # declares the queue
                best, ours, relayed = interleaved(
                    ROUNDS,
                    lambda: _bare(bare, count),
                    lambda: _sent(broker, count),
                    lambda: _relayed(relay, count),
                )
                consumed = _consumed(broker, bare, count)
            latencies = _latencies(address, scale)
    except ServerError as error:
        print(f"rabbitmq is skipped: {error}", file=sys.stderr)
        return []
    return [
        Figure("RabbitMQ: sends of the adapter", ours, "/s", 0.8, at_most=False, bound=best),
        Figure("RabbitMQ: relay", relayed, "/s", 0.8, at_most=False, bound=best),
        consumed,
        *latencies,
    ]


def _latencies(address: str, scale: float) -> list[Figure]:
    os.environ["BENCH_RABBITMQ"] = address  # for the processes
    try:
        with override_settings(OUTBOX=with_rabbitmq(address)):
            write_topics("default")
            return rabbitmq_latency.measure(address, scale)
    finally:
        del os.environ["BENCH_RABBITMQ"]


@contextmanager
def _outbox() -> Iterator[str]:
    """Start a node and point the settings at it; give its address."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as home, RabbitMQ(Path(home)) as node:
        options = {"NODES": [node.address], "GROUPS": {TOPIC: [ONE]}}
        broker = {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": options}
        brokers, topics = OUTBOX["BROKERS"], {**OUTBOX["TOPICS"], TOPIC: {"TYPE": "normal", "BROKER": ALIAS}}
        with override_settings(OUTBOX={**OUTBOX, "BROKERS": {**brokers, ALIAS: broker}, "TOPICS": topics}):
            write_topics("default")
            yield node.address
        write_topics("default")


def _bare(connection: amqp.Connection, count: int) -> float:
    """Publish to the queue, and wait for the confirms of each batch; return messages a second."""
    channel = connection.channel()
    channel.confirm_select()
    confirmed = [0]

    def on_ack(tag: int, multiple: bool) -> None:
        confirmed[0] = tag if multiple else confirmed[0] + 1

    events: dict[str, Any] = channel.events  # type: ignore[attr-defined]  # the stubs lack it
    events["basic_ack"].add(on_ack)
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        for _ in range(BATCH):
            message = amqp.Message(BODY, message_id=str(uuid.uuid4()), delivery_mode=2, application_headers=dict(HEADERS))
            channel.basic_publish(message, routing_key=QUEUE, mandatory=True)
        while confirmed[0] < first + BATCH:
            connection.drain_events(timeout=10)
    seconds = time.perf_counter() - began
    channel.close()
    _purge(connection)
    return count / seconds


def _sent(broker: Any, count: int) -> float:
    messages = [_message(number) for number in range(count)]
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        results = broker.send(messages[first : first + BATCH])
        if any(one.status is not SendStatus.ACCEPTED for one in results):
            raise RuntimeError(f"not accepted: {results[0]}")
    return count / (time.perf_counter() - began)


def _relayed(relay: Relay, count: int) -> float:
    empty(relay.connection)
    fill(relay.connection, [topic_id(TOPIC, "default")], count)
    began = time.perf_counter()
    sent = relay.drain().sent
    if sent != count:
        raise RuntimeError(f"{sent} of {count} were sent")
    return count / (time.perf_counter() - began)


def _consumed(broker: Any, bare: amqp.Connection, count: int) -> Figure:
    """Compare a worker and a bare consumer that acknowledges each message; both handle each in a transaction of its own."""
    _purge(bare)
    each = max(10, count // CONSUMED_IN)

    def ours() -> float:
        _sent(broker, each)
        with closing(Worker(group(ONE), ALIAS)) as worker:
            return handle_with(worker, each)

    def theirs() -> float:
        _sent(broker, each)
        channel = bare.channel()
        channel.basic_qos(0, PREFETCH, False)
        handled = [0]

        def handle(message: amqp.Message) -> None:
            handle_bare(message.properties["message_id"], json.loads(message.body))
            channel.basic_ack(message.delivery_info["delivery_tag"])
            handled[0] += 1

        began = time.perf_counter()
        channel.basic_consume(QUEUE, callback=handle)
        while handled[0] < each:
            bare.drain_events(timeout=10)
        seconds = time.perf_counter() - began
        channel.close()
        return each / seconds

    least, rate = interleaved(CONSUMED_IN, theirs, ours)
    return Figure("RabbitMQ: consumed with an inbox, one process", rate, "/s", 0.7, at_most=False, bound=least)


def _message(number: int) -> Outgoing:
    return Outgoing(str(uuid.uuid4()), TOPIC, b'{"number": %d}' % number + b" " * 180, headers=HEADERS)


def _purge(connection: amqp.Connection) -> None:
    channel = connection.channel()
    channel.queue_purge(QUEUE)
    channel.close()

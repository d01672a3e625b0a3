"""
A real Kafka of one node, started for it: the relay with and without transactions against a bare idempotent producer that awaits
its delivery reports by the batch, and the time from commit to a reader of committed records.

In bulk all publish messages of 200 bytes to one partition, 500 at a time, and in turn, so that noise hits all alike. The relays
read their messages from the database and mark them there, which the bare producer does not.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from django.db import transaction
from django.test.utils import override_settings

from benchmarks import latency
from benchmarks.consumers import ONE, TABLE, handle_bare, handle_with
from benchmarks.cpu import CpuClock
from benchmarks.figure import Figure, interleaved, percentile
from benchmarks.history import empty, fill
from benchmarks.latency import words
from benchmarks.messages import ClockedOnKafka
from benchmarks.processes import command, count, is_stopped, is_up, wait_until
from benchmarks.settings import with_kafka
from outbox import conf, database, publish
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.relay.hosts import PLANNER_SETTINGS
from outbox.relay.lane import take_lane
from outbox.relay.rounds import Relay
from outbox.topics import topic_id, write_topics
from project.servers.kafka import Kafka
from project.servers.program import ServerError

EXACTLY_ONCE, AT_LEAST_ONCE = "kafka", "kafka-plain"
CONSUMED = "bench-consumed"
BATCH = 500
BODY = b"x" * 200
HEADERS = [  # what a message of the relay carries
    ("ce_id", b"0190c1f8-0000-7000-8000-000000000000"),
    ("ce_source", b"urn:uuid:0190c1f8-0000-7000-8000-000000000000"),
    ("ce_specversion", b"1.0"),
    ("ce_type", b"BenchOrder"),
    ("ce_typeversion", b"1"),
    ("ce_tag", b"placed"),
    ("ce_time", b"2026-01-01T00:00:00Z"),
    ("ce_subject", b"1"),
    ("ce_lane", b"1"),
    ("ce_number", b"1"),
    ("content-type", b"application/json"),
]
ROUNDS = 7
CONSUMED_IN = 5  # rounds
PREFETCH = 100  # of the bare consumer
RATES = (10, 500)
SECONDS = 10
WARM_UP = 30  # messages
UNSENT = "SELECT (SELECT count(*) FROM outbox_ticket) + (SELECT count(*) FROM outbox_batch WHERE state IN (0, 1, 2))"
QUIET = {"log_level": 0, "error_cb": lambda error: None}


def measure(scale: float) -> list[Figure]:
    """Compare the ways to publish, then read; nothing where there is no Kafka to be had, which is said."""
    try:
        with _outbox() as address:
            handled = _handled(scale)  # while its topic is empty
            in_bulk = [*_bulk(address, int(10_000 * scale)), _consumed(address, int(10_000 * scale))]
            return [*in_bulk, *_readable(address, scale), *handled, _takeover(max(2, int(5 * scale)))]
    except (ServerError, ImportError) as error:
        print(f"kafka is skipped: {error}", file=sys.stderr)
        return []


@contextmanager
def _outbox() -> Iterator[str]:
    """Start a node with the topics and point the settings at it, those of processes, too; give its address."""
    from confluent_kafka.admin import AdminClient, NewTopic

    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as home, Kafka(Path(home)) as node:
        admin = AdminClient({"bootstrap.servers": node.address, **QUIET})
        new = [NewTopic(f"bench-{name}", 1) for name in (EXACTLY_ONCE, AT_LEAST_ONCE, "bare", "consumed")]
        for created in admin.create_topics(new).values():
            created.result(30)
        os.environ["BENCH_KAFKA"] = node.address
        try:
            found = with_kafka(node.address)
            topics = {**found["TOPICS"], CONSUMED: {"TYPE": "normal", "BROKER": EXACTLY_ONCE}}
            with override_settings(OUTBOX={**found, "TOPICS": topics}):
                write_topics("default")
                yield node.address
        finally:
            del os.environ["BENCH_KAFKA"]
        write_topics("default")


def _bulk(address: str, messages: int) -> list[Figure]:
    cpu: dict[str, list[float]] = {EXACTLY_ONCE: [], AT_LEAST_ONCE: []}
    with database.connect("default", settings=PLANNER_SETTINGS) as connection:
        connection.execute(TABLE)
        clock = CpuClock(connection)
        lane = take_lane(connection, lanes=16)
        with closing(conf.make_broker(EXACTLY_ONCE)) as broker, closing(conf.make_broker(AT_LEAST_ONCE)) as plain_broker:
            relays = {
                EXACTLY_ONCE: Relay(connection, broker, lane),
                AT_LEAST_ONCE: Relay(connection, plain_broker, lane),
            }

            def relayed(alias: str) -> float:
                empty(connection)
                fill(connection, [topic_id(f"bench-{alias}", "default")], messages)
                used, began = clock(), time.perf_counter()
                sent = relays[alias].drain().sent
                seconds = time.perf_counter() - began
                cpu[alias].append((clock() - used) / messages * 1e6)
                if sent != messages:
                    raise RuntimeError(f"{sent} of {messages} were sent")
                return messages / seconds

            bare, once, at_least_once = interleaved(
                ROUNDS, lambda: _bare(address, messages), lambda: relayed(EXACTLY_ONCE), lambda: relayed(AT_LEAST_ONCE)
            )
    return [
        Figure("Kafka: relay, exactly once", once, "/s", 0.6, at_most=False, bound=bare),
        Figure("Kafka: relay, at least once", at_least_once, "/s", None, at_most=False, bound=bare),
        Figure(
            "Kafka: CPU of a message, exactly once",
            statistics.median(cpu[EXACTLY_ONCE]),
            "us",
            None,
            at_most=True,
            bound=statistics.median(cpu[AT_LEAST_ONCE]),
            note="relay and PostgreSQL; beside at least once",
        ),
    ]


def _bare(address: str, messages: int) -> float:
    """Publish with an idempotent producer, and wait for the reports of each batch; return messages a second."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True, "acks": "all", "linger.ms": 5, **QUIET})
    failed: list[object] = []

    def report(error: object, _: object) -> None:
        if error is not None:
            failed.append(error)

    producer.list_topics("bench-bare", timeout=10)
    began = time.perf_counter()
    for _ in range(0, messages, BATCH):
        for _ in range(BATCH):
            headers = [("ce_id", str(uuid.uuid4()).encode()), *HEADERS[1:]]
            producer.produce("bench-bare", BODY, b"1", headers=headers, on_delivery=report)
            producer.poll(0)
        producer.flush(10)
    if failed:
        raise RuntimeError(f"not accepted: {failed[0]}")
    return messages / (time.perf_counter() - began)


def _consumed(address: str, messages: int) -> Figure:
    """Compare a worker and a bare consumer that commits each hundred; both handle each message in a transaction of its own."""
    from confluent_kafka import Consumer, Producer

    producer = Producer({"bootstrap.servers": address, **QUIET})
    settings = {"bootstrap.servers": address, "group.id": "bench-bare", "enable.auto.commit": False, **QUIET}
    each = max(100, messages // CONSUMED_IN)

    for number in range(2 * each * CONSUMED_IN):  # a worker handles a few more
        headers = [("ce_id", str(uuid.uuid4()).encode()), *HEADERS[1:]]
        producer.produce(CONSUMED, b'{"number": %d}' % number + b" " * 180, headers=headers)
        producer.poll(0)
    producer.flush(30)
    with (
        closing(Worker(group(ONE), EXACTLY_ONCE)) as worker,
        closing(Consumer({**settings, "auto.offset.reset": "earliest"})) as bare,
    ):

        def theirs(how_many: int = each) -> float:
            began, handled = time.perf_counter(), 0
            while handled < how_many:
                records = bare.consume(min(PREFETCH, how_many - handled), timeout=1)
                for record in records:
                    handle_bare(dict(record.headers())["ce_id"].decode(), json.loads(record.value()))
                if records:
                    bare.commit(asynchronous=False)
                handled += len(records)
            return how_many / (time.perf_counter() - began)

        bare.subscribe([CONSUMED])
        handle_with(worker, 1)  # the first assignment of their partition
        theirs(1)
        least, rate = interleaved(CONSUMED_IN, theirs, lambda: handle_with(worker, each))
    return Figure("Kafka: consumed with an inbox, one process", rate, "/s", 0.7, at_most=False, bound=least)


def _readable(address: str, scale: float) -> list[Figure]:
    """Return how long messages take from their commit to a bare reader of committed records."""
    found = []
    for rate in RATES:
        messages = max(20, int(rate * SECONDS * scale))
        with database.connect("default") as own:
            empty(own)
        with command("outbox_relay", "--broker", EXACTLY_ONCE) as relay, _Reader(address) as reader:
            wait_until(lambda relay=relay: is_up(relay), 30, "a relay")
            _publish(range(WARM_UP), rate)
            wait_until(lambda reader=reader: WARM_UP - 1 in reader.seen, 60, "the first messages")
            committed = _publish(range(1000, 1000 + messages), rate)
            wait_until(lambda reader=reader, committed=committed: committed.keys() <= reader.seen.keys(), 60, "all messages")
        taken = [(reader.seen[number] - at) * 1000 for number, at in committed.items()]
        title = f"Kafka: commit to readable, exactly once, {rate}/s"
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            found.append(Figure(f"{title}: {name}", percentile(taken, share), "ms", None, at_most=True, note=words(taken)))
    return found


def _handled(scale: float) -> list[Figure]:
    """Return how long messages take from their commit to their handler, by relay and consumer."""
    rate = RATES[0]
    with command("outbox_relay", "--broker", EXACTLY_ONCE) as relay, command("outbox_consume", "--group", "bench-kafka"):
        wait_until(lambda: is_up(relay), 30, "a relay")
        taken = latency.clock(ClockedOnKafka, max(20, int(rate * SECONDS * scale)), rate)
    return [
        Figure(
            f"Kafka: commit to handler, {rate}/s: {name}", percentile(taken, share), "ms", None, at_most=True, note=words(taken)
        )
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]


def _publish(numbers: range, per_second: float) -> dict[int, float]:
    """Publish messages at a rate; return when each was committed."""
    committed = {}
    began = time.perf_counter()
    for nth, number in enumerate(numbers):
        time.sleep(max(0.0, began + nth / per_second - time.perf_counter()))
        with transaction.atomic():
            publish(ClockedOnKafka(number=number))
        committed[number] = time.time()
    return committed


class _Reader:
    """A bare consumer, in a thread, that notes when it has read each number."""

    def __init__(self, address: str) -> None:
        self.seen: dict[int, float] = {}
        self._address = address
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        from confluent_kafka import Consumer, TopicPartition

        settings = {"bootstrap.servers": self._address, "group.id": "bench-reader", "enable.auto.commit": False, **QUIET}
        with closing(Consumer(settings)) as consumer:
            end = consumer.get_watermark_offsets(TopicPartition("bench-kafka", 0), timeout=10)[1]
            consumer.assign([TopicPartition("bench-kafka", 0, end)])
            while not self._is_over.is_set():
                record = consumer.poll(0.1)
                if record is not None and record.error() is None:
                    self.seen.setdefault(json.loads(record.value())["number"], time.time())


def _takeover(kills: int) -> Figure:
    """Take the median of some kills of a relay within its transaction: from its death to its batch sent by another one."""
    seen = []
    for _ in range(kills):
        doomed = command("outbox_relay", "--broker", EXACTLY_ONCE, OUTBOX_FAILPOINTS="relay.after_transaction=kill")
        with command("outbox_relay", "--broker", EXACTLY_ONCE) as heir, doomed as first:
            wait_until(lambda heir=heir, first=first: is_up(heir) and is_up(first), 30, "two relays")
            heir.send_signal(signal.SIGSTOP)
            wait_until(lambda heir=heir: is_stopped(heir.pid), 30, "the stop of the second relay")
            with transaction.atomic():
                publish(ClockedOnKafka(number=1))
            died = wait_until(lambda first=first: first.poll() is not None, 30, "the death of the first relay")
            with transaction.atomic():
                publish(ClockedOnKafka(number=2))
            heir.send_signal(signal.SIGCONT)
            seen.append(wait_until(lambda: not count(UNSENT), 30, "the batch sent") - died)
    note = f"slowest of {kills}: {max(seen):.2f} s"
    return Figure("Kafka: kill -9 of a relay to all sent", statistics.median(seen), "s", 5, at_most=True, note=note)

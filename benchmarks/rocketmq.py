"""
A real RocketMQ, started for it: the adapter against requests built by hand, and messages from commit to handler.

Machine, server and client share their processors; so the two are measured in turn, in short rounds, and the ratio is the
median of the rounds' ratios.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from django.test.utils import override_settings

from benchmarks import bare_port, latency
from benchmarks.consumers import ONE, TABLE, handle_bare, handle_with
from benchmarks.figure import Figure, interleaved, percentile
from benchmarks.history import empty, fill
from benchmarks.memory import peak_mib
from benchmarks.messages import ClockedOnRocketMQ
from benchmarks.processes import celery, command, count, is_up, wait_until
from benchmarks.settings import with_rocketmq
from outbox import database
from outbox.brokers.base import Ended, HalfRef, Outgoing, SendResult, SendStatus
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.message import COMMIT, TopicSpec, TopicType
from outbox.topics import topic_id, write_topics

FOLDER = Path("var/rocketmq")  # where `make rocketmq` keeps the jars, too
HALVES, WHOLES, CLOCKED, CONSUMED = "bench-rocketmq-bulk", "bench-wholes", "bench-rocketmq", "bench-consumed"
GROUP = "bench-rocketmq"
BATCH = 500  # as relays claim
ROUNDS = 11
CONSUMED_IN = 5  # rounds

BODY = b"x" * 200
HEADERS = {
    "ce-specversion": "1.0",
    "ce-source": "urn:uuid:0190c1f8-0000-7000-8000-000000000000",
    "ce-type": "BenchOrder",
    "ce-time": "2026-01-01T00:00:00Z",
    "content-type": "application/json",
    "outbox-lane": "1",
    "outbox-number": "1",
}
TOKEN = "0190c1f8-0000-7000-8000-000000000000:1:1:1"
SENT = "SELECT coalesce(sum(cardinality(message_ids)), 0) FROM outbox_batch WHERE state = 3"


def measure(scale: float) -> list[Figure]:
    """Measure everything, or report that RocketMQ is not available."""
    if importlib.util.find_spec("rocketmq") is None:
        print("rocketmq is skipped: its client is not installed here (make .venv/.rocketmq)", file=sys.stderr)
        return []
    from project.servers.program import ServerError

    try:
        with _server() as (server, ready_seconds):
            ready = Figure("RocketMQ ready after", ready_seconds, "s", 40, at_most=True)
            return [ready, *_adapter(server, scale), _consumed(server, scale), *_hosts(server, scale)]
    except ServerError as error:
        print(f"rocketmq is skipped: {error}", file=sys.stderr)
        return []


@contextmanager
def _server() -> Iterator[tuple[Any, float]]:
    """Start a node with production's checks; return it, and the start-up time in seconds without the download."""
    from project.servers.jars import fetch_jars
    from project.servers.rocketmq import POM, RocketMQ
    from project.servers.rocketmq_ports import Ports

    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as data:
        server = RocketMQ(FOLDER.resolve(), Ports.free(), data=Path(data))
        fetch_jars(POM, server.lib)
        began = time.monotonic()
        with server:
            seconds = time.monotonic() - began
            server.make_topic(HALVES, TopicType.TRANSACTION)
            server.make_topic(WHOLES, TopicType.NORMAL)
            server.make_topic(CLOCKED, TopicType.TRANSACTION)
            server.make_topic(CONSUMED, TopicType.NORMAL)
            for name in (GROUP, ONE, "bench-bare"):
                server.make_group(name)
            yield server, seconds


def _adapter(server: Any, scale: float) -> list[Figure]:
    """Compare the adapter with the bare pipelines: at the broker's own port, and through the proxy."""
    from benchmarks import bare_rocketmq
    from outbox.brokers.rocketmq import RocketMQBroker

    each = max(BATCH, int(1000 * scale))  # a node that has ended some ten thousand a minute is behind with its notes of them
    topics = [TopicSpec(HALVES, TopicType.TRANSACTION), TopicSpec(WHOLES, TopicType.NORMAL)]
    at_port = {"ENDPOINTS": server.endpoints, "NAME_SERVERS": [server.name_server]}
    through_proxy = {"ENDPOINTS": server.endpoints, "UNCONFIRMED_ENDS": True}
    where, properties = server.broker_address, {**HEADERS, "outbox-token": TOKEN}
    with closing(RocketMQBroker("default", through_proxy, topics)) as broker:
        found = _compared(
            "RocketMQ: half + commit through the proxy",
            lambda: _paced(lambda: bare_rocketmq.send_and_commit(server.endpoints, HALVES, properties, BODY, BATCH), BATCH),
            lambda: _paced(lambda: _send_and_commit(broker, BATCH), BATCH),
            at_least=None,
        )
    with closing(RocketMQBroker("default", at_port, topics)) as broker:
        found += _compared(
            "RocketMQ: half + answered commit",
            lambda: bare_port.send_and_commit(where, HALVES, {**properties, "PGROUP": HALVES}, BODY, each),
            lambda: _paced(lambda: _send_and_commit(broker, each), each),
            at_least=0.9,
        )
        found += _compared(
            "RocketMQ: plain sends",
            lambda: bare_port.send(where, WHOLES, HEADERS, BODY, each),
            lambda: _paced(lambda: _send(broker, each), each),
            at_least=0.9,
        )
    return found


def _paced(act: Callable[[], float], count: int) -> bare_port.Pace:
    """Run a measurement; return its messages per second, and the CPU time of each."""
    cpu = time.process_time()
    per_second = act()
    return bare_port.Pace(per_second, (time.process_time() - cpu) / count * 1e6)


def _compared(
    name: str, bare: Callable[[], bare_port.Pace], ours: Callable[[], bare_port.Pace], *, at_least: float | None
) -> list[Figure]:
    """Run both in turn, each once unmeasured first; return the rates, and this process's CPU for each message."""
    bare(), ours()
    pairs = [(bare(), ours()) for _ in range(ROUNDS)]
    ratios = sorted(mine.per_second / best.per_second for best, mine in pairs)
    bound = statistics.median(best.per_second for best, _ in pairs)
    note = f"ratio of each pair: {ratios[0]:.2f} to {ratios[-1]:.2f}; value = bound x their median"
    cpu, least = (statistics.median(one[turn].microseconds for one in pairs) for turn in (1, 0))
    return [
        Figure(name, bound * statistics.median(ratios), "/s", at_least, at_most=False, bound=bound, note=note),
        Figure(f"{name}: CPU of the relay", cpu, "us", None, at_most=True, bound=least),
    ]


def _consumed(server: Any, scale: float) -> Figure:
    """Compare a worker and the official client, which acknowledges each message; both handle each in a transaction of its own."""
    from rocketmq import ClientConfiguration, Credentials, FilterExpression, SimpleConsumer

    from outbox.brokers.rocketmq import RocketMQBroker

    options = {"ENDPOINTS": server.endpoints, "NAME_SERVERS": [server.name_server]}
    settings = with_rocketmq(options)
    topics = {**settings["TOPICS"], CONSUMED: {"TYPE": "normal", "BROKER": "rocketmq"}}
    each = max(20, int(400 * scale))
    configuration = ClientConfiguration(server.endpoints, Credentials())
    bare = SimpleConsumer(configuration, "bench-bare", {CONSUMED: FilterExpression()}, await_duration=5)
    with (
        override_settings(OUTBOX={**settings, "TOPICS": topics}),
        database.connect("default") as connection,
        closing(RocketMQBroker("rocketmq", options, [TopicSpec(CONSUMED, TopicType.NORMAL)])) as broker,
        closing(Worker(group(ONE), "rocketmq")) as worker,
    ):
        write_topics("default")
        connection.execute(TABLE)
        bare.startup()

        def theirs(how_many: int = each) -> float:
            began, handled = time.perf_counter(), 0
            while handled < how_many:
                for message in bare.receive(32, 60) or ():
                    handle_bare(str(uuid.uuid4()), json.loads(message.body))
                    bare.ack(message)
                    handled += 1
            return how_many / (time.perf_counter() - began)

        def produce(how_many: int) -> None:
            body = b'{"number": 1}' + b" " * 180
            ids = [str(uuid.uuid4()) for _ in range(how_many)]
            _require_accepted(broker.send([Outgoing(one, CONSUMED, body, headers={**HEADERS, "ce-id": one}) for one in ids]))

        def theirs_of_new() -> float:
            produce(each)  # both groups receive them
            return theirs()

        produce(1)
        handle_with(worker, 1)  # the groups begin
        theirs(1)
        least, rate = interleaved(CONSUMED_IN, theirs_of_new, lambda: handle_with(worker, each))
        bare.shutdown()
    return Figure("RocketMQ: consumed with an inbox, one process", rate, "/s", 0.7, at_most=False, bound=least)


def _messages(topic: str, how_many: int, token: str = "") -> list[Outgoing]:
    ids = [f"0190c1f8-0000-7000-8000-{number:012}" for number in range(how_many)]
    return [Outgoing(one, topic, BODY, headers={**HEADERS, "ce-id": one}, token=token) for one in ids]


def _send(broker: Any, how_many: int) -> float:
    messages = _messages(WHOLES, how_many)
    began = time.perf_counter()
    for at in range(0, how_many, BATCH):
        _require_accepted(broker.send(messages[at : at + BATCH]))
    return how_many / (time.perf_counter() - began)


def _send_and_commit(broker: Any, how_many: int) -> float:
    """Send as a relay does, without the decision."""
    messages = _messages(HALVES, how_many, TOKEN)
    began = time.perf_counter()
    for at in range(0, how_many, BATCH):
        outcomes = broker.send_halves(messages[at : at + BATCH])
        _require_accepted(outcomes)
        halves = [HalfRef(HALVES, one.half_id, "", one.place) for one in outcomes]
        _require_accepted(broker.end(halves, COMMIT), ended=Ended.COMMITTED)
    return how_many / (time.perf_counter() - began)


def _require_accepted(results: list[SendResult], *, ended: Ended | None = None) -> None:
    if wrong := [one for one in results if one.status is not SendStatus.ACCEPTED or one.ended is not ended]:
        raise RuntimeError(f"{len(wrong)} of {len(results)} were not accepted, the first: {wrong[0]}")


def _hosts(server: Any, scale: float) -> list[Figure]:
    """Measure relays in processes: long-running, and Celery's."""
    options = {"ENDPOINTS": server.endpoints, "NAME_SERVERS": [server.name_server]}
    os.environ["BENCH_ROCKETMQ"] = json.dumps(options)  # for the processes
    try:
        with override_settings(OUTBOX={**with_rocketmq(options), "CELERY_WAKEUP": True}):
            return [*_long_running(scale), *_celery(scale)]
    finally:
        del os.environ["BENCH_ROCKETMQ"]


def _long_running(scale: float) -> list[Figure]:
    messages = max(50, int(100 * scale))
    waiting = int(20_000 * scale)
    with command("outbox_relay", "--broker", "rocketmq") as relay, command("outbox_consume", "--group", GROUP):
        wait_until(lambda: is_up(relay), 30, "a relay")
        taken = latency.clock(ClockedOnRocketMQ, messages, latency.SLOW)
        with database.connect("default") as connection:
            empty(connection)
            fill(connection, [topic_id(HALVES, "default")], waiting)
        began = time.monotonic()
        done = wait_until(lambda: count(SENT) >= waiting, 300, "all messages sent")
        peak = peak_mib(relay.pid)
    rate = f"while it moved {waiting:,} messages, {waiting / (done - began):,.0f}/s"
    memory = Figure("RocketMQ: relay's memory", peak, "MiB", 150, at_most=True, note=rate)
    return [*_latency(f"outbox_relay, {latency.SLOW}/s", taken), memory]


def _celery(scale: float) -> list[Figure]:
    messages = max(50, int(300 * scale))
    with celery(), command("outbox_consume", "--group", GROUP):
        return _latency("Celery prefork", latency.clock(ClockedOnRocketMQ, messages))


def _latency(host: str, taken: list[float]) -> list[Figure]:
    name = f"RocketMQ, {host}: commit to handler"
    p50, p99 = percentile(taken, 0.5), percentile(taken, 0.99)
    return [
        Figure(f"{name}, p50", p50, "ms", None, at_most=True, note=latency.words(taken)),
        Figure(f"{name}, p99", p99, "ms", None, at_most=True),
    ]

"""
A storm: broker, proxy, relays of both hosts, checker, consumer and publishers are killed for minutes, by chance. In a cluster,
name servers too; brokers are frozen, and one is away for a minute while the others are hurt.

Its files are not found by pytest of itself: `make storm-rocketmq SECONDS=600` plays it, on a cluster by `NODES=3`. Then it is
counted, in the tables that the transactions wrote, in the brokers' own logs, and in what the handlers wrote.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from outbox.message import TopicType
from outbox.models import CheckBack, MessageState
from project.servers.remoting import read_all
from project.servers.rocketmq import Cluster, RocketMQ
from tests.journeys.outcome import Outcome
from tests.journeys.rocketmq.conftest import TABLES, Journey
from tests.journeys.rocketmq.names import outbox
from tests.rocketmq_node import PROXY, own_cluster
from tests.waiting import wait_until

SECONDS = float(os.environ.get("STORM_SECONDS", 600))
NODES = int(os.environ.get("STORM_NODES", 1))
PAUSE = (1.0, 5.0)  # seconds between two acts
AWAY = 60.0  # seconds
FREEZES = (1, 4, 12)  # seconds
PATIENCE = float(os.environ.get("STORM_PATIENCE", 600))  # seconds until all is settled

CHECKS = {"transactionTimeOut": 6000, "transactionCheckInterval": 1000, "transactionCheckMax": 1000}

CELERY = ["celery", "-A", "project", "worker", "--queues", "outbox,shop", "--concurrency", "2", "--loglevel", "WARNING"]
CELERY += ["--beat", "--without-gossip", "--without-mingle", "--without-heartbeat"]
PUBLISHER = "tests.journeys.rocketmq.publisher"

KINDS = {"relay": 2, "celery": 1, "checker": 1, "consumer": 2, "publisher": 1, "half-first": 1}  # how many of each
SENDING_TIMES = """
SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY extract(epoch FROM batch.sent_at - message.created_at))
FROM outbox_batch batch, unnest(batch.message_ids) id JOIN outbox_message message USING (id) WHERE batch.sent_at IS NOT NULL
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with own_cluster(NODES, CHECKS, {**PROXY, "transactionHeartbeatPeriodSecond": 1}) as found:
        yield found


@pytest.fixture
def journey(tmp_path: Path, transactional_db: None, settings: Any, cluster: Cluster) -> Iterator[Journey]:
    options = {"ENDPOINTS": cluster.endpoints, "NAME_SERVERS": cluster.name_servers}
    found = Journey(tmp_path, options, uuid.uuid4().hex[:8])
    found.with_ordered = False
    cluster.make_topic(found.work, TopicType.TRANSACTION)
    cluster.make_group(found.group)
    settings.OUTBOX = outbox(found.unique, options)
    with connection.cursor() as cursor:
        cursor.execute(TABLES)
        cursor.execute("CREATE TABLE journey_published (number int)")
    yield found
    found.close()
    print(found.logs())  # noqa: T201


class Storm:
    """Keeps processes running, and hurts them and their servers."""

    def __init__(self, journey: Journey, cluster: Cluster) -> None:
        self.journey, self.cluster = journey, cluster
        self.acts: Counter[str] = Counter()
        self.numbers = iter(range(0, 2_000_000_000, 1_000_000))
        self.running = {f"{kind} {nth}": self.start(kind) for kind, count in KINDS.items() for nth in range(count)}

    def start(self, kind: str) -> subprocess.Popen[bytes]:
        start = self.journey.start
        match kind:
            case "relay":
                return start("django", "outbox_relay")
            case "celery":
                return start(*CELERY, "--schedule", str(self.journey.folder / f"beat-{uuid.uuid4().hex}"))
            case "checker":
                return start("django", "outbox_checker")
            case "consumer":
                return self.journey.consume()
            case _:
                how = "half-first" if kind == "half-first" else "relay"
                return start(PUBLISHER, str(next(self.numbers)), how)

    def play(self, seconds: float) -> None:
        """Hurt by chance for so long, each time something else, so that a short storm has all of it."""
        acts: dict[str, Callable[[], None]] = {"proxy killed": self.kill_proxy}
        if len(self.cluster.nodes) > 1:
            acts |= {"name server killed": self.kill_name_server, "all name servers killed": self.kill_name_servers}
        others = {**acts, "broker killed": self.kill_broker}
        if len(self.cluster.nodes) > 1:
            others |= {"broker frozen": self.freeze_broker, "broker away": lambda: self.keep_away(acts)}
        self.hurt(others, time.monotonic() + seconds)

    def hurt(self, acts: dict[str, Callable[[], None]], ends_at: float) -> None:
        """Do these acts, then kill each of the processes, in random orders, brokers first, and again, until a time."""
        queue: list[str] = []
        while True:
            time.sleep(random.uniform(*PAUSE))
            if time.monotonic() >= ends_at:
                return
            if not queue:
                of_servers = sorted(random.sample([*acts], len(acts)), key=lambda name: not name.startswith("broker"))
                queue = [*of_servers, *random.sample([*self.running], len(self.running))]
            name = queue.pop(0)
            say(name if name in acts else f"{name} is killed")
            if name in acts:
                acts[name]()
                self.acts[name] += 1
            else:
                self.end(name)
                self.running[name] = self.start(kind := name.split(" ")[0])
                self.acts[f"{kind} killed"] += 1

    def kill_broker(self) -> None:
        node = random.choice(self.cluster.nodes)
        node.kill_broker()
        time.sleep(random.uniform(0, 3))
        node.start_broker()

    def freeze_broker(self) -> None:
        with random.choice(self.cluster.nodes).frozen_broker():
            time.sleep(random.choice(FREEZES))

    def keep_away(self, acts: dict[str, Callable[[], None]]) -> None:
        """Kill a broker and start it a minute later, while processes that are started know nothing of it."""
        node = random.choice(self.cluster.nodes)
        node.kill_broker()
        self.hurt(acts, time.monotonic() + AWAY)
        node.start_broker()
        say("the broker is back")

    def kill_proxy(self) -> None:
        self.cluster.proxy.kill()
        time.sleep(random.uniform(0, 3))
        self.cluster.proxy.start()

    def kill_name_server(self) -> None:
        self.kill_these([random.choice(self.cluster.named)])

    def kill_name_servers(self) -> None:
        self.kill_these(self.cluster.named)

    def kill_these(self, nodes: Sequence[RocketMQ]) -> None:
        for node in nodes:
            node.kill_namesrv()
        time.sleep(random.uniform(0, 3))
        for node in nodes:
            node.start_namesrv()

    def end(self, name: str) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running[name].wait()

    def calm(self) -> None:
        """Publish no more; start again what died by itself."""
        for name in list(self.running):
            if name.startswith(("publisher", "half-first")):
                self.end(name)
                del self.running[name]
            elif self.running[name].poll() is not None:
                self.running[name] = self.start(name.split(" ")[0])


@pytest.mark.timeout(4 * 3600)  # of the conftest's own it would have minutes
def test_storm(journey: Journey, cluster: Cluster):
    storm = Storm(journey, cluster)
    storm.play(SECONDS)
    storm.calm()
    calm_at = time.monotonic()
    say("all is calm")
    with suppress(AssertionError):
        wait_until(lambda: not MessageState.objects.exclude(state="sent").exists(), PATIENCE)
        wait_until(lambda: set(numbers("journey_effect")) >= set(numbers("journey_published")), PATIENCE)

    committed = set(numbers("journey_published"))
    copies, applied = copies_in(cluster, journey.work), Counter(numbers("journey_effect"))
    more = copies.total() - len(copies)
    report: dict[str, Any] = {
        "acts": dict(storm.acts),
        "seconds to settle": round(time.monotonic() - calm_at),
        "committed": len(committed),
        "lost": len(committed - copies.keys()),
        "ghosts": len(copies.keys() - committed),
        "applied twice": sum(times > 1 for times in applied.values()),
        "not applied": len(committed - applied.keys()),
        "copies too many": more,
        "copies per 1,000": round(1000 * more / max(1, len(committed)), 1),
        "not sent": MessageState.objects.exclude(state="sent").count(),
        "check-backs": CheckBack.objects.count(),
        "seconds from publish to sent, p50 and p99": sending_times(),
    }
    Outcome(
        run="relays and consumers",
        broker="rocketmq",
        nodes=NODES,
        seconds=SECONDS,
        faults=storm.acts,
        messages=len(committed),
        lost=report["lost"] + report["not applied"],
        ghosts=report["ghosts"],
        copies=more,
        applied_twice=report["applied twice"],
        out_of_order=None,
        settled_seconds=report["seconds to settle"],
    ).write()
    print("STORM", json.dumps(report))  # noqa: T201
    assert [report[name] for name in ("lost", "ghosts", "applied twice", "not applied", "not sent")] == [0] * 5
    assert committed


def numbers(table: str) -> list[int]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT number FROM {table}")
        return [number for (number,) in cursor.fetchall()]


def sending_times() -> list[float]:
    """Return the seconds that half of the messages needed to be sent, and those that nearly all needed."""
    with connection.cursor() as cursor:
        cursor.execute(SENDING_TIMES)
        return [round(seconds, 1) for seconds in cursor.fetchone()[0]]


def copies_in(cluster: Cluster, topic: str, queues: int = 4) -> Counter[int]:
    """Count the copies of each number that consumers can see, in the brokers' own logs."""
    return Counter(
        json.loads(one.body)["number"] for node in cluster.nodes for one in read_all(node.broker_address, topic, queues)
    )


def say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", flush=True)  # noqa: T201

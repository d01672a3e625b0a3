"""
A storm: broker, proxy, relays of both hosts, checker, consumer and publishers are killed for minutes, by chance.

Its files are not found by pytest of itself: `make storm-rocketmq SECONDS=600` plays it. Then it is counted, in the tables that
the transactions wrote, in the broker's own log, and in what the handlers wrote.
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from outbox.message import TopicType
from outbox.models import CheckBack, MessageState
from project.servers.remoting import read_all
from project.servers.rocketmq import RocketMQ
from project.servers.rocketmq_proxy import ClusterProxy
from tests.journeys.outcome import Outcome
from tests.journeys.rocketmq.conftest import TABLES, Journey
from tests.journeys.rocketmq.names import outbox
from tests.rocketmq_node import PROXY, own_node
from tests.waiting import wait_until

SECONDS = float(os.environ.get("STORM_SECONDS", 600))
PAUSE = (1.0, 5.0)  # seconds between two kills
PATIENCE = float(os.environ.get("STORM_PATIENCE", 600))  # seconds until all is settled

CHECKS = {"transactionTimeOut": 6000, "transactionCheckInterval": 1000, "transactionCheckMax": 1000}

CELERY = ["celery", "-A", "project", "worker", "--queues", "outbox,shop", "--concurrency", "2", "--loglevel", "WARNING"]
CELERY += ["--beat", "--without-gossip", "--without-mingle", "--without-heartbeat"]
PUBLISHER = "tests.journeys.rocketmq.publisher"

KINDS = {"relay": 2, "celery": 1, "checker": 1, "consumer": 2, "publisher": 1, "half-first": 1}  # how many of each
SERVERS = ("broker", "proxy")

SENDING_TIMES = """
SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY extract(epoch FROM batch.sent_at - message.created_at))
FROM outbox_batch batch, unnest(batch.message_ids) id JOIN outbox_message message USING (id) WHERE batch.sent_at IS NOT NULL
"""

Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def node() -> Iterator[RocketMQ]:
    with own_node(CHECKS) as found:
        yield found


@pytest.fixture
def proxy(node: RocketMQ) -> Iterator[ClusterProxy]:
    found = ClusterProxy(node, {**PROXY, "transactionHeartbeatPeriodSecond": 1}).start()
    yield found
    found.kill()


@pytest.fixture
def journey(tmp_path: Path, transactional_db: None, settings: Any, node: RocketMQ, proxy: ClusterProxy) -> Iterator[Journey]:
    options = {"ENDPOINTS": proxy.endpoints, "NAME_SERVERS": [node.name_server]}
    found = Journey(tmp_path, options, uuid.uuid4().hex[:8])
    found.with_ordered = False
    node.make_topic(found.work, TopicType.TRANSACTION)
    node.make_group(found.group)
    settings.OUTBOX = outbox(found.unique, options)
    with connection.cursor() as cursor:
        cursor.execute(TABLES)
        cursor.execute("CREATE TABLE journey_published (number int)")
    yield found
    found.close()
    print(found.logs())  # noqa: T201


class Storm:
    """Keeps processes running, and kills them."""

    def __init__(self, journey: Journey, node: RocketMQ, proxy: ClusterProxy) -> None:
        self.journey, self.node, self.proxy = journey, node, proxy
        self.kills: Counter[str] = Counter()
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

    def blow(self) -> None:
        """Kill something, and start it again."""
        victim = random.choice([*self.running, *SERVERS])
        self.kills[victim.split(" ")[0]] += 1
        print(f"{time.strftime('%X')} {victim} is killed", flush=True)  # noqa: T201
        if victim == "broker":
            self.node.kill_broker()
            time.sleep(random.uniform(0, 3))
            self.node.start_broker()
        elif victim == "proxy":
            self.proxy.kill()
            time.sleep(random.uniform(0, 3))
            self.proxy.start()
        else:
            self.end(victim)
            self.running[victim] = self.start(victim.split(" ")[0])

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
def test_storm(journey: Journey, node: RocketMQ, proxy: ClusterProxy):
    storm = Storm(journey, node, proxy)
    ends_at = time.monotonic() + SECONDS
    while time.monotonic() < ends_at:
        time.sleep(random.uniform(*PAUSE))
        storm.blow()
    storm.calm()
    calm_at = time.monotonic()
    print(f"{time.strftime('%X')} all is calm", flush=True)  # noqa: T201
    with suppress(AssertionError):
        wait_until(lambda: not MessageState.objects.exclude(state="sent").exists(), PATIENCE)
        wait_until(lambda: set(numbers("journey_effect")) >= set(numbers("journey_published")), PATIENCE)

    committed = set(numbers("journey_published"))
    copies, applied = copies_in(node, journey.work), Counter(numbers("journey_effect"))
    more = copies.total() - len(copies)
    report: dict[str, Any] = {
        "kills": dict(storm.kills),
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
        seconds=SECONDS,
        faults=storm.kills,
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


def copies_in(node: RocketMQ, topic: str, queues: int = 4) -> Counter[int]:
    """Count the copies of each number that consumers can see, in the broker's own log."""
    return Counter(json.loads(one.body)["number"] for one in read_all(node.broker_address, topic, queues))

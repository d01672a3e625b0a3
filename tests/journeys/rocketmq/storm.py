"""
A storm: broker, proxy, relays of both hosts, checker, consumer and publishers are killed for minutes, by chance. In a cluster,
name servers too; brokers are frozen, and one is away for a minute while the others are hurt.

Its files are not found by pytest of itself: `make storm-rocketmq SECONDS=600` plays it, on a cluster by `NODES=3`. Then it is
counted, in the tables that the transactions wrote, in the brokers' own logs, and in what the handlers wrote.
"""

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outbox.message import TopicType
from outbox.models import CheckBack, MessageState
from project.servers.remoting import read_all
from project.servers.rocketmq import Cluster, RocketMQ
from tests.journeys import storms
from tests.journeys.outcome import Outcome
from tests.journeys.rocketmq.conftest import TABLES, Journey
from tests.journeys.rocketmq.names import outbox
from tests.journeys.storms import NODES, Acts, say, seconds_of_storm, show
from tests.journeys.tables import rows, tables
from tests.rocketmq_node import PROXY, own_cluster

SECONDS = seconds_of_storm(600)
AWAY = 60.0  # seconds
PATIENCE = float(os.environ.get("STORM_PATIENCE", 600))  # seconds until all is settled

CHECKS = {"transactionTimeOut": 6000, "transactionCheckInterval": 1000, "transactionCheckMax": 1000}

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
    with tables(f"{TABLES}; CREATE TABLE journey_published (number int)"):
        yield found


class Storm(storms.Storm):
    """A storm on one node or a cluster."""

    kinds = {"relay": 2, "celery": 1, "checker": 1, "consumer": 2, "publisher": 1, "half-first": 1}
    publishers = ("publisher", "half-first")
    publisher = "tests.journeys.rocketmq.publisher"
    freezes = (1, 4, 12)
    first = ("broker killed", "broker frozen", "broker away")

    def __init__(self, journey: Journey, cluster: Cluster) -> None:
        super().__init__(journey, {}, journey.unique)
        self.journey, self.cluster, self.nodes = journey, cluster, [cluster.proxy]
        self.begin()

    def list_acts(self) -> Acts:
        acts: Acts = {f"{kind} killed": (count, partial(self.kill, kind)) for kind, count in self.kinds.items()}
        acts["proxy killed"] = (1, lambda: self.restart(self.cluster.proxy))
        if len(self.cluster.nodes) > 1:
            acts["name server killed"] = (1, lambda: self._kill_name_servers([self.chance.choice(self.cluster.named)]))
            acts["all name servers killed"] = (1, lambda: self._kill_name_servers(self.cluster.named))
        others = {**acts, "broker killed": (1, self._kill_broker)}
        if len(self.cluster.nodes) > 1:
            others |= {"broker frozen": (1, self._freeze_broker), "broker away": (1, lambda: self._keep_away(acts))}
        return others

    def command(self, kind: str) -> list[str]:
        match kind:
            case "checker":
                return ["django", "outbox_checker"]
            case "consumer":
                return ["django", "outbox_consume", "--group", self.journey.group]
            case "half-first":
                return [*super().command(kind), "half-first"]
            case _:
                return super().command(kind)

    def is_under_way(self) -> bool:
        return bool(numbers("journey_effect"))

    def is_settled(self) -> bool:
        """Return whether each message is sent and handled."""
        is_sent = not MessageState.objects.exclude(state="sent").exists()
        return is_sent and set(numbers("journey_effect")) >= set(numbers("journey_published"))

    def _kill_broker(self) -> None:
        node = self.chance.choice(self.cluster.nodes)
        node.kill_broker()
        time.sleep(self.chance.uniform(0, 3))
        node.start_broker()

    def _freeze_broker(self) -> None:
        with self.chance.choice(self.cluster.nodes).frozen_broker():
            time.sleep(self.chance.choice(self.freezes))

    def _keep_away(self, acts: Acts) -> None:
        """Kill a broker and start it a minute later, while processes that are started know nothing of it."""
        node = self.chance.choice(self.cluster.nodes)
        node.kill_broker()
        self.hurt(acts, time.monotonic() + AWAY)
        node.start_broker()
        say("the broker is back")

    def _kill_name_servers(self, nodes: Sequence[RocketMQ]) -> None:
        for node in nodes:
            node.kill_namesrv()
        time.sleep(self.chance.uniform(0, 3))
        for node in nodes:
            node.start_namesrv()


class Count:
    """What a storm has left behind, in the tables, in the brokers' logs, and at the handlers."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        self.committed = set(numbers("journey_published"))
        self.copies = copies_in(storm.cluster, storm.journey.work)
        self.applied = Counter(numbers("journey_effect"))
        self.lost = self.committed - self.copies.keys()
        self.ghosts = self.copies.keys() - self.committed
        self.not_applied = self.committed - self.applied.keys()
        self.applied_twice = {number for number, times in self.applied.items() if times > 1}
        self.not_sent = MessageState.objects.exclude(state="sent").count()
        self.more = self.copies.total() - len(self.copies)

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "acts": dict(self.storm.acts),
            "seconds to settle": round(self.storm.settled_after),
            "committed": len(self.committed),
            "lost": len(self.lost),
            "ghosts": len(self.ghosts),
            "applied twice": len(self.applied_twice),
            "not applied": len(self.not_applied),
            "copies too many": self.more,
            "copies per 1,000": round(1000 * self.more / max(1, len(self.committed)), 1),
            "not sent": self.not_sent,
            "check-backs": CheckBack.objects.count(),
            "seconds from publish to sent, p50 and p99": sending_times(),
        }

    def outcome(self, seconds: float) -> Outcome:
        """Return the figures of the report."""
        return Outcome(
            run="relays and consumers",
            broker="rocketmq",
            nodes=NODES,
            seconds=seconds,
            faults=self.storm.acts,
            messages=len(self.committed),
            lost=len(self.lost) + len(self.not_applied),
            ghosts=len(self.ghosts),
            copies=self.more,
            applied_twice=len(self.applied_twice),
            out_of_order=None,
            settled_seconds=self.storm.settled_after,
        )


@pytest.mark.timeout(4 * 3600)  # of the conftest's own it would have minutes
def test_storm(journey: Journey, cluster: Cluster):
    with closing(Storm(journey, cluster)) as storm:
        storm.play(SECONDS)
        storm.calm()
        storm.settle(PATIENCE)

        show(count := Count(storm), SECONDS)
    assert (count.lost, count.ghosts, count.applied_twice, count.not_applied, count.not_sent) == (set(), set(), set(), set(), 0)
    assert count.committed


def numbers(table: str) -> list[int]:
    return [number for (number,) in rows(f"SELECT number FROM {table}")]


def sending_times() -> list[float]:
    """Return the seconds that half of the messages needed to be sent, and those that nearly all needed."""
    [(found,)] = rows(SENDING_TIMES)
    return [round(seconds, 1) for seconds in found]


def copies_in(cluster: Cluster, topic: str, queues: int = 4) -> Counter[int]:
    """Count the copies of each number that consumers can see, in the brokers' own logs."""
    return Counter(
        json.loads(one.body)["number"] for node in cluster.nodes for one in read_all(node.broker_address, topic, queues)
    )

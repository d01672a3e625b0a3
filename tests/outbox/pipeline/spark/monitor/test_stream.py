"""The whole monitor: Spark reads micro-batches, is killed at the worst moments, and counts nothing twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox.failpoints import VARIABLE
from outbox.models import Duplicate, FailedDelivery, Inbox, State
from outbox.pipeline.models import MonitorJob, MonitorLane
from outbox.pipeline.spark.config import Group, PipelineConfig, Source
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.jobs.monitor import stream
from tests.factories import BatchFactory, TopicFactory, message_id
from tests.outbox.pipeline.spark.monitor.conftest import settle

pytestmark = pytest.mark.slow

LANES = 3
PER_LANE = 400
NOW = datetime.now(UTC)


class World:
    """Numbers that are sent and handled, part by part, with holes and repeats; and what that adds up to."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.topic = TopicFactory(name="orders")
        self.chance = random.Random(7)
        self.next = dict.fromkeys(range(LANES), 1)
        self.handled: dict[int, set[int]] = {lane: set() for lane in range(LANES)}
        self.again = dict.fromkeys(range(LANES), 0)
        self.failed = 0

    def go_on(self) -> None:
        """Send and handle the next numbers of each lane; a tenth is not handled, a twentieth is handled twice."""
        for lane, first in self.next.items():
            numbers = range(first, first + PER_LANE)
            ids = [message_id() for _ in numbers]
            self.next[lane] += PER_LANE
            BatchFactory(topic=self.topic, lane=lane, first_seq=first, message_ids=ids, state=State.SENT, sent_at=NOW)
            come = {number for number in numbers if self.chance.random() > 0.1} | {numbers[-1]}
            again = {number for number in come if self.chance.random() < 0.05}
            Inbox.objects.bulk_create(
                Inbox(
                    consumer_group="cart",
                    topic="orders",
                    source=self.source,
                    lane=lane,
                    number=number,
                    dedupe_key=f"{lane} {number} {nth}",
                    message_id=message_id(),
                )
                for numbers, nth in ((come, 1), (again, 2))
                for number in numbers
            )
            self.handled[lane] |= come
            self.again[lane] += len(again)
        of = {"consumer_group": "cart", "topic": "orders", "message_id": message_id(), "nth": 1}
        FailedDelivery.objects.create(**of, source=self.source, lane=0, number=1, outcome="retry", fingerprint="", error="")
        Duplicate.objects.create(**of)
        self.failed += 1

    def expected(self) -> set[tuple[object, ...]]:
        """Return group, lane, seen, missing, duplicates, highest, failed of each standing."""
        found: set[tuple[object, ...]] = {("cart", -1, 0, None, self.failed, None, 0)}
        for lane, following in self.next.items():
            top, handled = following - 1, self.handled[lane]
            found.add(("", lane, top, 0, 0, top, 0))
            failed = self.failed if lane == 0 else 0
            found.add(("cart", lane, len(handled), top - len(handled), self.again[lane], top, failed))
        return found


def standings() -> set[tuple[object, ...]]:
    names = ("consumer_group", "lane", "seen", "missing", "duplicates", "highest", "failed")
    return set(MonitorLane.objects.values_list(*names))


@pytest.fixture
def world(source: str) -> World:
    return World(source)


@pytest.fixture
def config(url: str) -> PipelineConfig:
    return PipelineConfig(Source(url, reader="python"), groups=[Group("cart", ["orders"])], shuffle_partitions=2)


@pytest.fixture
def killed(config: PipelineConfig, tmp_path: Path) -> Callable[[str], str]:
    """Run the job as a process that is killed at a place; give what it said."""
    (tmp_path / "config.json").write_text(replace(config, driver_memory="512m").to_json())
    command = [sys.executable, "-m", "outbox.pipeline.spark.jobs.monitor", "--config", str(tmp_path / "config.json")]

    def run(place: str) -> str:
        environment = {**os.environ, VARIABLE: f"{place}=kill", "TZ": "UTC"}
        outcome = subprocess.run(
            [*command, "--checkpoint", str(tmp_path / "checkpoint")], env=environment, capture_output=True, text=True
        )
        assert outcome.returncode == -signal.SIGKILL, outcome.stderr
        return outcome.stderr

    return run


class TestTheMonitor:
    def test_counts_each_row_once_though_it_is_killed(self, spark, config, world, killed, tmp_path, capfd):
        def go_on() -> None:
            stream(spark, config, str(tmp_path / "checkpoint"), every=None, is_stopped=lambda: False)

        world.go_on()
        settle(config.outbox.url)
        killed("monitor.in_transaction")
        assert not MonitorJob.objects.exists()

        killed("monitor.after_transaction")
        assert MonitorJob.objects.get().batch == 0
        assert standings() == world.expected()

        world.go_on()
        settle(config.outbox.url)
        go_on()

        said = capfd.readouterr().err.splitlines()
        assert [line.endswith("which were applied before") for line in said] == [True, False]
        assert MonitorJob.objects.get().batch == 1
        assert standings() == world.expected()

    def test_goes_on_until_it_is_stopped(self, spark, config, world, tmp_path):
        deadline = datetime.now(UTC) + timedelta(seconds=240)
        world.go_on()
        settle(config.outbox.url)
        is_done = {"once": False}

        def is_stopped() -> bool:
            if not is_done["once"] and standings() == world.expected():
                is_done["once"] = True
                world.go_on()
            return (is_done["once"] and standings() == world.expected()) or datetime.now(UTC) > deadline

        stream(spark, config, str(tmp_path / "checkpoint"), every=0.5, is_stopped=is_stopped)

        assert is_done["once"]
        assert standings() == world.expected()

    def test_says_that_it_needs_a_newer_spark(self, spark, config, tmp_path, monkeypatch):
        monkeypatch.setattr("pyspark.__version__", "4.1.2")

        with pytest.raises(PipelineError, match=r"needs pyspark 4\.2 or newer, and this is 4\.1\.2"):
            stream(spark, config, str(tmp_path), every=None, is_stopped=lambda: True)

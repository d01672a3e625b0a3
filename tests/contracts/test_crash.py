"""Processes that are killed: what a consumer held comes back, and what a producer was told holds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from django.conf import settings
from django.db import connections

from outbox.brokers.base import Broker, Ended, HalfRef, HalfStatus, SendStatus
from outbox.message import COMMIT, ROLLBACK, TopicType
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import Harness

HALF = TopicType.TRANSACTION

Start = Callable[[str, TopicType], subprocess.Popen[str]]

PROGRAM = """
import json, os, sys, time
from datetime import timedelta
sys.path.insert(0, os.getcwd())
import django
django.setup()
from django.db import connections
connections["default"].settings_dict["NAME"] = os.environ["TEST_DATABASE"]
from outbox.brokers.base import HalfRef, Outgoing
from outbox.message import COMMIT, TopicSpec, TopicType
from tests.contracts.harness import HARNESSES

harness, topic, kind, options = sys.argv[1:]
spec = TopicSpec(topic, TopicType(kind))
broker = HARNESSES[harness].broker_class("default", json.loads(options), [spec])
{act}
time.sleep(600)
"""

# Receives over a broker of its own, says which messages it holds, and never finishes them.
RECEIVE = """
found = []
while len(found) < 3:
    found += broker.receive("group", [topic], limit=3 - len(found), invisible_for=timedelta(seconds=60), wait=timedelta())
print(json.dumps([delivery.message_id for delivery in found]), flush=True)
"""

# Sends and commits a half message, and says what it was told.
COMMIT_HALF = """
[half] = broker.send_halves([Outgoing("m", topic, b"a")])
[result] = broker.end([HalfRef(topic, half.half_id, "m", half.place)], COMMIT)
print(result.status, half.half_id, flush=True)
"""


@pytest.fixture
def start(harness: Harness, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a process with a broker of its own, which does something with a topic and then waits to be killed."""
    started: list[subprocess.Popen[str]] = []

    def start(act: str, kind: TopicType) -> subprocess.Popen[str]:
        name = request.node.callspec.params["harness"]
        arguments = [name, harness.topic(kind), kind, json.dumps(harness.options_elsewhere())]
        database = connections["default"].settings_dict["NAME"]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("{act}", act), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=settings.BASE_DIR,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.process_settings", "TEST_DATABASE": database},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.needs("is_shared_by_processes")
class TestKilledConsumer:
    @pytest.mark.parametrize("kind", [TopicType.NORMAL, TopicType.FIFO])
    def test_gives_its_messages_back_when_their_time_is_over(self, acts: Acts, harness: Harness, start: Start, kind: TopicType):
        acts.send(*[acts.message(kind, key=f"k{n}") for n in range(5)])
        started_at = harness.age()
        consumer = start(RECEIVE, kind)
        assert consumer.stdout is not None
        held = json.loads(consumer.stdout.readline())

        consumer.kill()
        consumer.wait(30)
        found = acts.receive_while_time_passes(INVISIBLE * 2, kind, count=5)  # the consumer began later, by its own clock

        again = [aged for aged in found if aged.delivery.delivery_count > 1]
        assert len(found) == 5
        assert {aged.delivery.message_id for aged in again} >= set(held)
        if not harness.gives_back_at_once:  # one that does also counts what the process had fetched ahead
            assert len(again) == len(held)
            assert all(aged.age - started_at >= INVISIBLE for aged in again)


@pytest.mark.needs("is_shared_by_processes", "HalfMessages", "confirms_ends")
class TestKilledProducer:
    def test_leaves_visible_what_it_was_told_is_committed(self, acts: Acts, harness: Harness, start: Start):
        producer = start(COMMIT_HALF, HALF)
        assert producer.stdout is not None
        told, half_id = producer.stdout.readline().split()

        producer.kill()
        producer.wait(30)

        assert told == "accepted"
        assert acts.look_up(acts.decide(HalfRef(harness.topic(HALF), half_id, "m"))) is HalfStatus.VISIBLE
        assert [delivery.body for delivery in acts.receive(HALF)] == [b"a"]


@pytest.mark.needs("can_restart", "HalfMessages")
class TestRestart:
    def test_leaves_half_messages_hidden_to_be_ended(self, acts: Acts, harness: Harness):
        one, other = acts.decided_half(), acts.decided_half()

        harness.restart()
        later = Acts(harness, harness.open())

        assert [later.look_up(half) for half in (one, other)] == [HalfStatus.HIDDEN] * 2
        assert later.end(one) == [Ended.COMMITTED]
        assert later.end(other, resolution=ROLLBACK) == [Ended.ROLLED_BACK]
        assert [delivery.message_id for delivery in later.receive(HALF, count=1)] == [one.message_id]

    @pytest.mark.needs("confirms_ends")
    def test_leaves_visible_what_was_answered(self, acts: Acts, harness: Harness):
        halves = [acts.decided_half() for _ in range(5)]
        assert acts.end(*halves) == [Ended.COMMITTED] * 5

        harness.restart()
        later = Acts(harness, harness.open())

        assert [later.look_up(half) for half in halves] == [HalfStatus.VISIBLE] * 5
        assert len(later.receive(HALF, count=5)) == 5

    def test_finds_nothing_of_what_was_rolled_back(self, acts: Acts, harness: Harness):
        half = acts.decided_half()
        acts.end(half, resolution=ROLLBACK)

        harness.restart()
        later = Acts(harness, harness.open())

        assert later.look_up(half) is not HalfStatus.VISIBLE
        assert later.receive(HALF) == []

    def test_lets_a_broker_go_on_that_was_open(self, acts: Acts, broker: Broker, harness: Harness):
        half = acts.decided_half()

        harness.restart()
        [first] = broker.end([half], COMMIT)

        if acts.look_up(half) is HalfStatus.HIDDEN:
            assert first.status in (SendStatus.UNSURE, SendStatus.UNAVAILABLE)
            assert acts.end(half) == [Ended.COMMITTED]
        assert acts.look_up(half) is HalfStatus.VISIBLE
        assert len(acts.receive(HALF, count=1)) == 1

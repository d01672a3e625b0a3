"""A consumer process that is killed: its messages come back."""

import json
import os
import signal
import subprocess
import sys

import pytest
from django.conf import settings
from django.db import connections

from outbox.message import TopicType
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import Harness

# Receives over a broker of its own, says how many it holds, and never finishes them.
CONSUMER = """
import json, os, sys, time
from datetime import timedelta
sys.path.insert(0, os.getcwd())
import django
django.setup()
from django.db import connections
connections["default"].settings_dict["NAME"] = os.environ["TEST_DATABASE"]
from outbox.message import TopicSpec, TopicType
from tests.contracts.harness import HARNESSES
harness, topic, kind, options = sys.argv[1:]
spec = TopicSpec(topic, TopicType(kind))
broker = HARNESSES[harness].broker_class("default", json.loads(options), [spec])
found = []
while len(found) < 3:
    found += broker.receive("group", {topic: None}, limit=3 - len(found), invisible_for=timedelta(seconds=60), wait=timedelta())
print(len(found), flush=True)
time.sleep(600)
"""


@pytest.mark.needs("is_shared_by_processes")
class TestKilledConsumer:
    @pytest.mark.parametrize("kind", [TopicType.NORMAL, TopicType.FIFO])
    def test_gives_its_messages_back_when_their_time_is_over(
        self, acts: Acts, harness: Harness, request: pytest.FixtureRequest, kind: TopicType
    ):
        acts.send(*[acts.message(kind, key=f"k{n}") for n in range(5)])
        started_at = harness.age()
        consumer = self._start(request.node.callspec.params["harness"], harness, kind)
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == "3\n"

        consumer.send_signal(signal.SIGKILL)
        consumer.wait(30)
        found = acts.receive_while_time_passes(INVISIBLE * 2, kind, count=5)  # the consumer began later, by its own clock

        assert sorted(one.delivery.attempt for one in found) == [1, 1, 2, 2, 2]
        assert all(one.age - started_at >= INVISIBLE for one in found if one.delivery.attempt == 2)

    def _start(self, name: str, harness: Harness, kind: TopicType) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CONSUMER, name, harness.topic(kind), kind, json.dumps(harness.options_elsewhere())],
            stdout=subprocess.PIPE,
            text=True,
            cwd=settings.BASE_DIR,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "tests.settings",
                "TEST_DATABASE": connections["default"].settings_dict["NAME"],
            },
        )

"""SIGTERM while RocketMQ is away, and the first message after it is back."""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from django.conf import settings as django_settings

from outbox.message import TopicType
from outbox.shutdown import UNFINISHED
from tests.journeys.shutdown import INVISIBLE
from tests.journeys.shutdown.node import Node
from tests.journeys.shutdown.scene import LIMIT, Scene, end, seconds_until, wait
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rocketmq,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not importlib.util.find_spec("rocketmq"), reason="There is no client of RocketMQ."),
]

Away = Callable[[], AbstractContextManager[None]]

AWAY_SECONDS = float(os.environ.get("OUTAGE_SECONDS", "15"))  # by then every back-off has reached its limit


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    from project.servers.rocketmq_ports import Ports

    folder = Path(django_settings.BASE_DIR) / "var/rocketmq"
    folder.mkdir(parents=True, exist_ok=True)
    data = Path(tempfile.mkdtemp(prefix="data-", dir=folder))
    with Node(folder, Ports.free(), proxy={"minInvisibleTimeMillsForRecv": 100}, data=data) as node:
        node.make_topic("work", TopicType.TRANSACTION)
        node.make_group("shutdown")
        yield node
    shutil.rmtree(data, ignore_errors=True)


@pytest.fixture
def options(node: Node) -> dict[str, object]:
    return {"ENDPOINTS": node.endpoints, "NAME_SERVERS": [node.name_server]}


@pytest.fixture
def relay(scene: Scene) -> subprocess.Popen[str]:
    """A relay that has sent messages."""
    process = scene.start("django", "outbox_relay")
    scene.publish(5)
    wait_until(lambda: scene.sent() == 5, 60)
    return process


@pytest.fixture
def consumer(scene: Scene, relay: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """A consumer that has handled messages."""
    process = scene.start("django", "outbox_consume")
    wait_until(lambda: scene.handled() == 5, 60)
    return process


@pytest.fixture
def checker(scene: Scene) -> subprocess.Popen[str]:
    """A checker that listens."""
    process = scene.start("django", "outbox_checker")
    wait_until(lambda: scene.listens("checker"), 60)
    return process


@pytest.fixture(params=["relay", "consumer", "checker"])
def process(request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    """One of them."""
    found: subprocess.Popen[str] = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["killed", "frozen"])
def away(request: pytest.FixtureRequest, node: Node) -> Away:
    """What takes broker and proxy away."""
    return node.killed if request.param == "killed" else lambda: node.frozen("broker")


class TestSigterm:
    def test_ends_a_process_while_broker_and_proxy_are_away(self, scene: Scene, process: subprocess.Popen[str], away: Away):
        with away():
            scene.publish(100)
            wait(2, process)
            seconds = end(process)

        assert seconds < LIMIT
        assert process.returncode in (0, UNFINISHED)
        assert "Traceback" not in scene.said(process)

    def test_ends_a_process_while_all_is_frozen(self, scene: Scene, process: subprocess.Popen[str], node: Node):
        with node.frozen("broker", "namesrv"):
            scene.publish(100)
            scene.server.freeze()
            seconds = end(process)
            scene.server.thaw()

        assert seconds < LIMIT
        assert process.returncode in (0, UNFINISHED)

    def test_ends_a_process_that_is_well(self, scene: Scene, process: subprocess.Popen[str]):
        seconds = end(process, signal.SIGINT)

        assert seconds < LIMIT
        assert process.returncode == 0


class TestConsumerThatEnds:
    def test_leaves_no_message_behind_in_the_request_that_it_gives_up(self, scene: Scene, relay: subprocess.Popen[str]):
        """The server keeps that request open for 5 s, and what it hands out is hidden for long."""
        hidden_for = {INVISIBLE: "300"}
        consumer = scene.start("django", "outbox_consume", **hidden_for)
        wait_until(lambda: scene.handled() == 5, 60)
        wait(1, consumer)
        end(consumer)

        scene.publish(10)
        wait_until(lambda: scene.sent() == 15, 60)
        scene.start("django", "outbox_consume", **hidden_for)

        wait_until(lambda: scene.handled() == 15, 60)


class TestFirstMessage:
    def test_goes_at_once_when_broker_and_proxy_are_back(
        self, scene: Scene, relay: subprocess.Popen[str], consumer: subprocess.Popen[str], away: Away
    ):
        with away():
            scene.publish(20)
            wait(AWAY_SECONDS, relay)
        scene.publish()

        seconds = seconds_until(iter(lambda: scene.handled() > 5, None))

        print(f"handled after {seconds:.1f} s")  # noqa: T201
        assert seconds < LIMIT
        wait_until(lambda: scene.sent() == scene.handled() == 26, 120)

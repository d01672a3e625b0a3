"""The demo on a real RocketMQ that it starts itself."""

import json
import os
import subprocess
import sys
from contextlib import closing

import pytest
from django.conf import settings

from outbox.brokers.base import HalfRef, Outgoing
from outbox.message import COMMIT, TopicSpec, TopicType
from tests.journeys.demos import Demo
from tests.waiting import wait_until

SHIPMENTS = TopicSpec("shipments", TopicType.TRANSACTION)


@pytest.fixture(scope="class")
def played(tmp_path_factory):
    """A demo that has been played to its end."""
    demo = Demo(tmp_path_factory.mktemp("demo"), "--broker", "rocketmq", "--json")
    demo.finish(seconds=480)
    return demo


@pytest.mark.rocketmq
@pytest.mark.slow
@pytest.mark.timeout(540)
class TestTheDemoOnRocketMQ:
    def test_keeps_the_promise(self, played):
        assert played.process.returncode == 0, played.stderr

        report = json.loads(played.stdout)
        assert (report["lost"], report["ghosts"], report["applied_twice"]) == (0, 0, 0)
        assert report["missing"] == []

    def test_tells_what_the_other_demo_tells(self, played):
        report = json.loads(played.stdout)

        assert report["orders"] + report["rolled_back"] == 127
        assert report["published"] == 2 * report["orders"] + 6
        assert report["half_messages"] > report["published"]
        assert report["duplicate_copies"] >= 0

    def test_has_the_inbox_drop_what_comes_again(self, played):
        report = json.loads(played.stdout)

        assert report["duplicates_dropped"] > 0  # behind a deferred message's commit, a kill leaves none

    def test_leaves_nothing_behind(self, played):
        wait_until(lambda: played.left_behind() == (0, 0, 0))


@pytest.mark.timeout(420)
class TestADemoThatCannotHaveRocketMQ:
    def test_says_how_to_name_a_node(self):
        finished = _demo("--rocketmq", "127.0.0.1:8081")

        assert finished.returncode == 1
        assert "name the proxy's and the name server's port, like 127.0.0.1:8081,127.0.0.1:9876" in finished.stderr

    @pytest.mark.rocketmq
    def test_says_that_nobody_answers(self):
        finished = _demo("--rocketmq", "127.0.0.1:1,127.0.0.1:1")

        assert finished.returncode == 1
        assert "The RocketMQ that name server 127.0.0.1:1 knows cannot be used" in finished.stderr

    @pytest.mark.rocketmq
    def test_leaves_a_node_alone_whose_topics_are_in_use(self):
        from outbox.brokers.rocketmq import RocketMQBroker
        from tests.outbox.brokers.rocketmq.log import copies
        from tests.rocketmq_node import server

        node = server()
        node.make_topic("shipments", TopicType.TRANSACTION)
        with closing(
            RocketMQBroker("default", {"ENDPOINTS": node.endpoints, "NAME_SERVERS": [node.name_server]}, [SHIPMENTS])
        ) as broker:
            [half] = broker.send_halves([Outgoing("1", "shipments", b"{}", token="here:1:1:1")])
            broker.end([HalfRef("shipments", half.half_id, "1", half.place)], COMMIT)
        wait_until(lambda: copies("shipments", "1"), 60)

        finished = _demo("--rocketmq", f"{node.endpoints},{node.name_server}")

        assert finished.returncode == 1
        assert f"at {node.name_server} has messages already" in finished.stderr
        assert "has messages already. Give the demo a fresh node" in finished.stderr

    @pytest.mark.rocketmq
    def test_says_what_to_install(self, tmp_path):
        (tmp_path / "python").symlink_to(sys.executable)

        finished = _demo(PATH=str(tmp_path))

        assert finished.returncode == 1
        assert "RocketMQ needs java, which is not on PATH. On Debian and Ubuntu: apt-get install" in finished.stderr


def _demo(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "manage.py", "outbox_demo", "--broker", "rocketmq", *arguments],
        cwd=settings.BASE_DIR,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "project.settings", **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )

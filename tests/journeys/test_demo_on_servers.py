"""The demo on a real server that it starts itself, kills where it can, and starts again."""

import json
import os
import subprocess
import sys
from contextlib import closing

import pytest
from django.conf import settings

from outbox.brokers.base import HalfRef, Outgoing
from outbox.message import COMMIT, TopicSpec, TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.journeys.demos import Demo
from tests.waiting import wait_until

SHIPMENTS = TopicSpec("shipments", TopicType.TRANSACTION)

SECONDS = {"rabbitmq": 220, "kafka": 220, "rocketmq": 480}
MARKS = {
    "rabbitmq": [pytest.mark.rabbitmq, pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server.")],
    "kafka": [pytest.mark.kafka],
    "rocketmq": [pytest.mark.rocketmq],
}


def on(*brokers):
    """Run tests once for each of the brokers, after one demo on it."""
    marks = {broker: [*MARKS[broker], pytest.mark.slow, pytest.mark.timeout(SECONDS[broker] + 60)] for broker in brokers}
    return pytest.mark.parametrize("played", [pytest.param(name, marks=marks[name]) for name in brokers], indirect=True)


@pytest.fixture(scope="module")
def played(request, tmp_path_factory):
    """A demo that has been played to its end."""
    demo = Demo(tmp_path_factory.mktemp("demo"), "--broker", request.param, "--json")
    demo.finish(seconds=SECONDS[request.param])
    return demo


@pytest.fixture
def report(played):
    assert played.stdout, played.stderr
    return json.loads(played.stdout)


@on("rabbitmq", "kafka", "rocketmq")
class TestTheDemo:
    def test_keeps_the_promise(self, played, report):
        assert played.process.returncode == 0, played.stderr
        assert (report["lost"], report["ghosts"], report["applied_twice"]) == (0, 0, 0)
        assert report["missing"] == []

    def test_plays_the_day_of_the_embedded_one(self, report):
        assert report["orders"] + report["rolled_back"] == 127
        assert report["published"] == 2 * report["orders"] + 6

    def test_has_the_inbox_drop_what_comes_again(self, report):
        assert report["duplicates_dropped"] > 0  # behind a deferred message's commit, a kill leaves none

    def test_leaves_nothing_behind(self, played):
        wait_until(lambda: played.left_behind() == (0, 0, 0))


@on("rabbitmq", "kafka")
class TestTheDemoThatKillsItsServer:
    def test_does_so_while_the_server_has_messages(self, report):
        assert report["outage"]["held"] >= 10
        assert report["outage"]["invoices"] > 0

    def test_kills_relays_and_consumers_behind_their_work(self, report):
        assert report["kills_by"]["long_running"] + report["kills_by"]["celery"] >= 5
        assert report["kills_by"]["unmarked"] >= 3
        assert report["kills_by"]["unacked"] >= 5


class TestCopies:
    @on("rabbitmq")
    def test_are_what_relays_send_again_that_they_had_not_marked(self, report):
        assert report["duplicate_copies"] >= 3

    @on("kafka")
    def test_are_none_with_transactions(self, report):
        assert report["duplicate_copies"] == 0


class TestHalfMessages:
    @on("rocketmq")
    def test_are_more_than_the_messages(self, report):
        assert report["half_messages"] > report["published"]

    @on("rabbitmq")
    def test_are_none_and_have_no_check_backs_where_the_broker_takes_messages_in_one_phase(self, played, report):
        assert (report["half_messages"], sum(report["check_backs"].values())) == (0, 0)
        assert "none, and no check-backs: the broker takes messages in one phase" in played.stderr


@pytest.mark.timeout(420)
class TestADemoThatCannotHaveRocketMQ:
    def test_says_how_to_name_a_node(self):
        finished = _demo("--rocketmq", "127.0.0.1:8081")

        assert finished.returncode == 1
        assert "give the addresses of proxy and name server, like 127.0.0.1:8081,127.0.0.1:9876" in finished.stderr

    @pytest.mark.rocketmq
    def test_says_that_nobody_answers(self):
        finished = _demo("--rocketmq", "127.0.0.1:1,127.0.0.1:1")

        assert finished.returncode == 1
        assert "The RocketMQ of name server 127.0.0.1:1 cannot be used" in finished.stderr

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
        assert "has messages already. Use a new node" in finished.stderr

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

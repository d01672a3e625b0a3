"""The demo on a real RabbitMQ that it starts itself, kills, and starts again."""

import json

import pytest

from project.servers.rabbitmq import RabbitMQ
from tests.journeys.demos import Demo
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server: apt-get install rabbitmq-server."),
]


@pytest.fixture(scope="class")
def played(tmp_path_factory):
    """A demo that has been played to its end."""
    demo = Demo(tmp_path_factory.mktemp("demo"), "--broker", "rabbitmq", "--json")
    demo.finish(seconds=220)
    return demo


class TestTheDemoOnRabbitMQ:
    def test_keeps_the_promise(self, played):
        assert played.process.returncode == 0, played.stderr

        report = json.loads(played.stdout)
        assert (report["lost"], report["ghosts"], report["applied_twice"]) == (0, 0, 0)
        assert report["missing"] == []

    def test_plays_the_day_of_the_other_demos(self, played):
        report = json.loads(played.stdout)

        assert report["orders"] + report["rolled_back"] == 127
        assert report["published"] == 2 * report["orders"] + 6
        assert report["kills_by"]["long_running"] + report["kills_by"]["celery"] >= 5
        assert report["kills_by"]["unacked"] >= 5
        assert report["duplicates_dropped"] > 0  # behind a deferred message's commit, a kill leaves none

    def test_kills_the_broker_while_it_has_messages(self, played):
        outage = json.loads(played.stdout)["outage"]

        assert outage["held"] >= 10
        assert outage["invoices"] > 0

    def test_has_relays_send_again_what_they_had_not_marked(self, played):
        report = json.loads(played.stdout)

        assert report["kills_by"]["unmarked"] >= 3
        assert report["duplicate_copies"] >= 3

    def test_says_that_there_are_no_half_messages(self, played):
        report = json.loads(played.stdout)

        assert (report["half_messages"], sum(report["check_backs"].values())) == (0, 0)
        assert "none, and no check-backs: the broker takes messages in one phase" in played.stderr

    def test_leaves_nothing_behind(self, played):
        wait_until(lambda: played.left_behind() == (0, 0, 0))

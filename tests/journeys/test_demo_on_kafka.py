"""The demo on a real Kafka that it starts itself, kills, and starts again."""

import json

import pytest

from tests.journeys.demos import Demo
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="class")
def played(tmp_path_factory):
    """A demo that has been played to its end."""
    demo = Demo(tmp_path_factory.mktemp("demo"), "--broker", "kafka", "--json")
    demo.finish(seconds=220)
    return demo


class TestTheDemoOnKafka:
    def test_keeps_the_promise(self, played):
        assert played.process.returncode == 0, played.stderr

        report = json.loads(played.stdout)
        assert (report["lost"], report["ghosts"], report["applied_twice"]) == (0, 0, 0)
        assert report["missing"] == []

    def test_publishes_each_message_once_though_relays_and_broker_are_killed(self, played):
        report = json.loads(played.stdout)

        assert report["kills_by"]["unmarked"] >= 3
        assert report["outage"]["held"] >= 10
        assert report["published"] == 2 * report["orders"] + 6
        assert report["duplicate_copies"] == 0

    def test_drops_what_killed_consumers_had_handled(self, played):
        report = json.loads(played.stdout)

        assert report["kills_by"]["unacked"] >= 5
        assert report["duplicates_dropped"] > 0  # behind a deferred message's commit, a kill leaves none

    def test_leaves_nothing_behind(self, played):
        wait_until(lambda: played.left_behind() == (0, 0, 0))

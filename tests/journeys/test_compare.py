"""`outbox_demo --compare` as a user runs it, and its table in the README."""

import json
import re

import pytest

from project.servers.rabbitmq import RabbitMQ
from tests.journeys import readme
from tests.journeys.demos import Demo

LINE = re.compile(r"^  (?P<name>[a-z][\w ]+?) +(?P<cells>\d+ +\d+ +\d+)(?P<note>  \S.*)?$", re.MULTILINE)
HEADING = re.compile(r"^ +delay\(\) +on_commit +outbox$", re.MULTILINE)

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server: apt-get install rabbitmq-server."),
]


@pytest.fixture(scope="class")
def played(tmp_path_factory):
    """A comparison that has been played to its end."""
    demo = Demo(tmp_path_factory.mktemp("demo"), "--compare", "--json")
    demo.finish(seconds=270)
    return demo


def rows(text):
    """Return the table's rows: label and note, and which cells are zero. Other counts differ by timing."""
    heading = HEADING.search(text)
    assert heading, text
    table = text[heading.end() :].partition("```")[0]
    found = {(line["name"], line["note"]): [int(cell) == 0 for cell in line["cells"].split()] for line in LINE.finditer(table)}
    for (name, _), is_zero in found.items():
        if name == "too early":
            is_zero[0] = False  # on a busy machine a task may start late enough each time
    return found


class TestTheComparison:
    def test_has_the_outbox_alone_keep_the_promise(self, played):
        assert played.process.returncode == 0, played.stderr

        report = json.loads(played.stdout)
        assert (report["kept"], report["missing"]) == (True, [])
        outbox = report["ways"]["outbox"]
        assert (outbox["lost"], outbox["ghosts"], outbox["early"], outbox["applied_twice"]) == (0, 0, 0, 0)

    def test_loses_orders_after_their_commit_and_no_others(self, played):
        ways = json.loads(played.stdout)["ways"]

        assert ways["on_commit"]["lost"] >= 2  # kills after the commit
        assert ways["delay"]["lost"] == 0

    def test_makes_ghosts_of_orders_that_were_sent_before_their_commit_and_of_no_others(self, played):
        ways = json.loads(played.stdout)["ways"]

        assert ways["delay"]["ghosts"] >= 10  # declined payments, and kills before the commit
        assert ways["on_commit"]["ghosts"] == 0

    def test_kills_the_same_in_all_ways(self, played):
        ways = json.loads(played.stdout)["ways"]

        assert [way["kills"] for way in ways.values()] == [9, 9, 11]  # 2 of the relay

    def test_has_requests_fail_with_the_outbox_only_where_the_web_process_was_killed(self, played):
        ways = json.loads(played.stdout)["ways"]

        assert ways["outbox"]["failed_requests"] == 4
        assert ways["on_commit"]["failed_requests"] > 4
        assert ways["delay"]["failed_requests"] > 4

    def test_is_what_the_readme_shows(self, played):
        shown, seen = rows(readme.section(readme.WHY)), rows(played.stderr)

        assert len(seen) == 8
        assert shown == seen

    def test_leaves_nothing_behind(self, played):
        assert played.left_behind() == (0, 0, 0)

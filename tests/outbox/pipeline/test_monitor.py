"""How lanes stand, and what the command and the task make of the job: here one that cannot begin."""

import json
import subprocess
import sys
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from outbox import tasks
from outbox.pipeline import monitor
from outbox.pipeline.errors import MonitorFailed
from outbox.pipeline.models import MonitorLane

pytestmark = pytest.mark.django_db

SETTLE = timedelta(minutes=5)


@pytest.fixture(autouse=True)
def _lanes():
    now = timezone.now()
    of = {"source": "us", "topic": "orders", "seen": 9, "highest": 12}
    for group, minutes in (("late", 6), ("under-way", 4)):
        since = now - timedelta(minutes=minutes)
        MonitorLane.objects.create(**of, consumer_group=group, lane=1, missing=2, first_missing=7, first_missing_since=since)
    MonitorLane.objects.create(**of, consumer_group="", lane=-1)


class TestStandings:
    def test_are_late_where_the_same_number_is_missing_for_longer_than_the_settle_time(self):
        assert [one.group for one in monitor.late("default", SETTLE)] == ["late"]

    def test_have_no_lane_where_messages_carry_no_number(self):
        assert [(one.group, one.lane) for one in monitor.standings("default")] == [("", None), ("late", 1), ("under-way", 1)]


class TestAJobThatCannotBegin:
    @pytest.fixture(autouse=True)
    def _no_java(self, monkeypatch, tmp_path):
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    def test_is_an_error_that_says_why(self, tmp_path):
        said = []

        with pytest.raises(MonitorFailed, match=r"could not go on \(exit code 2\)\. \S") as caught:
            monitor.run_monitor("default", str(tmp_path / "checkpoint"), say=said.append)

        assert f"The monitor cannot go on: {str(caught.value).partition('. ')[2]}" in said

    def test_ends_the_command_with_2(self, tmp_path):
        with pytest.raises(CommandError) as caught:
            call_command("outbox_monitor", "--once", "--checkpoint", str(tmp_path))

        assert caught.value.returncode == 2

    def test_is_a_line_in_the_log_of_the_task(self, tmp_path, caplog):
        tasks.monitor(str(tmp_path / "checkpoint"))

        assert "run_monitor does not succeed now: The monitor could not go on (exit code 2)" in caplog.text


STOPS = """
import time
from outbox.pipeline.spark.jobs.monitor import _stops
is_stopped = _stops(with_parent=True)
print(is_stopped(), flush=True)
while not is_stopped():
    time.sleep(0.01)
"""


class TestAJobThatGoesOn:
    def test_is_stopped_when_its_caller_is_told_to(self, monkeypatch, tmp_path):
        monkeypatch.setattr(monitor, "JOB", "tests.outbox.pipeline.audit_runs.stand_in")
        monkeypatch.setenv("OUTBOX_TEST_JOB", "goes on")
        said = []

        monitor.run_monitor("default", str(tmp_path), every=1.0, is_stopped=lambda: bool(said), say=said.append)

        assert said == ["starting Spark"]

    def test_stops_when_its_parent_is_gone(self):
        with subprocess.Popen([sys.executable, "-c", STOPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
            try:
                assert job.stdout.readline() == "False\n"

                job.stdin.close()

                assert job.wait(30) == 0
            finally:
                job.kill()


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def _after_the_job(self, monkeypatch):
        """Leave the job out: what it does is proved in pipeline/monitor."""
        from outbox.pipeline.management.commands import outbox_monitor

        monkeypatch.setattr(outbox_monitor, "run_monitor", lambda *_, **__: None)

    def run(self, *arguments):
        output = StringIO()
        with pytest.raises(SystemExit) as caught:
            call_command("outbox_monitor", "--once", "--checkpoint", "nowhere", *arguments, stdout=output)
        assert caught.value.code == 1
        return output.getvalue()

    def test_names_what_is_late(self):
        said = self.run()

        assert "! 2 missing to late in topic 'orders', lane 1: the first is number 7, since " in said
        assert said.count("!") == 1

    def test_says_it_as_json(self):
        said = json.loads(self.run("--json"))

        assert [one["group"] for one in said["lanes"]] == ["", "late", "under-way"]
        assert [(one["group"], one["first_missing"]) for one in said["late"]] == [("late", 7)]

    def test_ends_well_where_nothing_is_late(self):
        MonitorLane.objects.filter(consumer_group="late").delete()
        output = StringIO()

        call_command("outbox_monitor", "--once", "--checkpoint", "nowhere", stdout=output)

        assert "Nothing is missing that is not under way." in output.getvalue()

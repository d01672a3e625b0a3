"""How lanes stand, and the job as a process."""

import subprocess
import sys
from datetime import timedelta

import pytest

from outbox.pipeline import monitor
from outbox.pipeline.errors import MonitorFailed

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lanes")]

SETTLE = timedelta(minutes=5)


class TestStandings:
    def test_are_late_where_the_same_number_is_missing_for_longer_than_the_settle_time(self):
        assert [one.group for one in monitor.late("default", SETTLE)] == ["late"]

    def test_have_no_lane_where_messages_carry_no_number(self):
        assert [(one.group, one.lane) for one in monitor.standings("default")] == [("", None), ("late", 1), ("under-way", 1)]


class TestAJobThatCannotBegin:
    def test_is_an_error_that_says_why(self, no_java, tmp_path):
        said = []

        with pytest.raises(MonitorFailed, match=r"could not go on \(exit code 2\)\. \S") as caught:
            monitor.run_monitor("default", str(tmp_path / "checkpoint"), say=said.append)

        assert f"The monitor cannot go on: {str(caught.value).partition('. ')[2]}" in said


STOPS = """
import time
from outbox.pipeline.spark.jobs.monitor import watch_for_the_end
is_stopped = watch_for_the_end(with_parent=True)
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

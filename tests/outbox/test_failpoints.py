import os
import signal
import subprocess
import sys

import pytest

from outbox.failpoints import VARIABLE, FailpointReached, failpoint

PASS_TWICE = "from outbox.failpoints import failpoint; failpoint('here'); print('lives', flush=True); failpoint('here')"


@pytest.fixture
def run():
    """Run a program with these failpoints; return its exit code and output."""

    def run(plan, program=PASS_TWICE):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, VARIABLE: plan}
        )
        output, _ = process.communicate(timeout=60)
        return process.pid, process.returncode, output

    return run


class TestFailpoint:
    def test_does_nothing_without_a_plan(self, monkeypatch):
        monkeypatch.delenv(VARIABLE, raising=False)

        failpoint("relay.after_half")

    def test_does_nothing_where_the_plan_names_another_place(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "relay.before_half=raise")

        failpoint("relay.after_half")

    def test_raises_past_every_except_exception(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "relay.after_half=raise")

        with pytest.raises(FailpointReached):
            failpoint("relay.after_half")

    def test_acts_at_the_named_pass_only(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "at the second=raise@2")
        failpoint("at the second")

        with pytest.raises(FailpointReached):
            failpoint("at the second")
        failpoint("at the second")

    def test_names_an_action_that_it_does_not_know(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "relay.after_half=kil")

        with pytest.raises(ValueError, match=r"relay\.after_half the action 'kil'"):
            failpoint("relay.after_half")

    def test_kills_the_process(self, run):
        _, code, output = run("here=kill")

        assert (code, output) == (-signal.SIGKILL, "")


class TestAPermit:
    def test_is_taken_along_by_the_process_it_kills(self, run, tmp_path):
        permit = tmp_path / "permit"
        permit.touch()

        pid, code, output = run(f"here=kill:{permit}")

        assert (code, output) == (-signal.SIGKILL, "")
        assert [path.name for path in tmp_path.iterdir()] == [f"permit.{pid}"]

    def test_is_needed_to_kill(self, run, tmp_path):
        _, code, output = run(f"here=kill:{tmp_path / 'permit'}")

        assert (code, output) == (0, "lives\n")

    def test_kills_one_process_alone(self, run, tmp_path):
        permit = tmp_path / "permit"
        permit.touch()
        run(f"here=kill:{permit}")

        _, code, output = run(f"here=kill:{permit}")

        assert (code, output) == (0, "lives\n")

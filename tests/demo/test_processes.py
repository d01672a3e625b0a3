import os
import signal
import sys

import pytest

from project.demo.processes import DemoError, Processes
from tests.waiting import wait_until

SLEEP = [sys.executable, "-c", "print('here', flush=True); import time; time.sleep(60)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(60)",
]
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); time.sleep(60)",
]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def processes(tmp_path):
    with Processes(tmp_path, {}) as processes:
        yield processes


@pytest.fixture
def start(processes, tmp_path):
    """Start a process; return its id once it has said something."""

    def start(command, name="sleeper"):
        processes.start(name, command)
        wait_until((tmp_path / f"{name}.log").read_text)
        return processes.pid(name)

    return start


class TestCrew:
    def test_starts_again_what_was_killed(self, processes, start):
        pid = start(SLEEP)
        os.kill(pid, signal.SIGKILL)

        wait_until(lambda: processes.tend() or processes.pid("sleeper") != pid)

        assert is_alive(processes.pid("sleeper"))

    def test_leaves_dead_what_is_held_until_it_is_released(self, processes, start):
        pid = start(SLEEP)
        processes.hold("sleeper")
        os.kill(pid, signal.SIGKILL)

        wait_until(lambda: processes.tend() or not is_alive(pid))
        assert processes.pid("sleeper") == pid

        processes.release("sleeper")
        assert processes.pid("sleeper") != pid

    def test_says_what_a_process_said_that_ended_by_itself(self, processes):
        processes.start("broken", [sys.executable, "-c", "import sys; sys.exit('no such table')"])

        with pytest.raises(DemoError, match="broken ended with exit code 1:\nno such table"):
            wait_until(processes.tend)

    def test_stops_all(self, processes, start):
        pids = [start(SLEEP, name) for name in ("one", "two")]

        deaf = processes.stop()

        assert deaf == []
        assert not any(map(is_alive, pids))

    def test_stops_what_does_not_listen(self, processes, start, monkeypatch):
        monkeypatch.setattr("project.demo.processes.STOP_SECONDS", 0.2)
        pid = start(DEAF)

        deaf = processes.stop()

        assert deaf == ["sleeper"]
        assert not is_alive(pid)

    def test_stops_the_children_that_a_process_leaves_behind(self, processes, start, tmp_path):
        start(PARENT)
        child = int((tmp_path / "sleeper.log").read_text())

        processes.stop()

        wait_until(lambda: not is_alive(child))

    def test_stops_all_when_something_raises(self, tmp_path):
        pids = []

        def interrupted():
            with Processes(tmp_path, {}) as processes:
                processes.start("sleeper", SLEEP)
                pids.append(processes.pid("sleeper"))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert not is_alive(pids[0])

    def test_says_why_a_run_failed(self, processes):
        with pytest.raises(DemoError, match="migrate ended with exit code 1:\nno database"):
            processes.run("migrate", [sys.executable, "-c", "import sys; sys.exit('no database')"])

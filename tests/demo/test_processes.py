import os
import signal
import sys

import pytest

from project.demo.processes import Crew, DemoError
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
def crew(tmp_path):
    with Crew(tmp_path, {}) as crew:
        yield crew


@pytest.fixture
def start(crew, tmp_path):
    """Start a process of the crew; return its id once it has said something."""

    def start(command, name="sleeper"):
        crew.start(name, command)
        wait_until((tmp_path / f"{name}.log").read_text)
        return crew.pid(name)

    return start


class TestCrew:
    def test_starts_again_what_was_killed(self, crew, start):
        pid = start(SLEEP)
        os.kill(pid, signal.SIGKILL)

        wait_until(lambda: crew.tend() or crew.pid("sleeper") != pid)

        assert is_alive(crew.pid("sleeper"))

    def test_leaves_dead_what_is_held_until_it_is_released(self, crew, start):
        pid = start(SLEEP)
        crew.hold("sleeper")
        os.kill(pid, signal.SIGKILL)

        wait_until(lambda: crew.tend() or not is_alive(pid))
        assert crew.pid("sleeper") == pid

        crew.release("sleeper")
        assert crew.pid("sleeper") != pid

    def test_says_what_a_process_said_that_ended_by_itself(self, crew):
        crew.start("broken", [sys.executable, "-c", "import sys; sys.exit('no such table')"])

        with pytest.raises(DemoError, match="broken ended with exit code 1:\nno such table"):
            wait_until(crew.tend)

    def test_stops_all(self, crew, start):
        pids = [start(SLEEP, name) for name in ("one", "two")]

        deaf = crew.stop()

        assert deaf == []
        assert not any(map(is_alive, pids))

    def test_stops_what_does_not_listen(self, crew, start, monkeypatch):
        monkeypatch.setattr("project.demo.processes.STOP_SECONDS", 0.2)
        pid = start(DEAF)

        deaf = crew.stop()

        assert deaf == ["sleeper"]
        assert not is_alive(pid)

    def test_stops_the_children_that_a_process_leaves_behind(self, crew, start, tmp_path):
        start(PARENT)
        child = int((tmp_path / "sleeper.log").read_text())

        crew.stop()

        wait_until(lambda: not is_alive(child))

    def test_stops_all_when_something_raises(self, tmp_path):
        pids = []

        def interrupted():
            with Crew(tmp_path, {}) as crew:
                crew.start("sleeper", SLEEP)
                pids.append(crew.pid("sleeper"))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert not is_alive(pids[0])

    def test_says_why_a_run_failed(self, crew):
        with pytest.raises(DemoError, match="migrate ended with exit code 1:\nno database"):
            crew.run("migrate", [sys.executable, "-c", "import sys; sys.exit('no database')"])

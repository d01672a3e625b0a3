"""The watch over an end, in the pools where the process has more to do. Commands and children: tests/journeys/endings/."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from outbox import ending
from outbox.ending import Watch, handler_runs
from outbox.relay.resident import Resident
from tests.waiting import wait_until

SAID = "cannot end before it returns"


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "LIMIT_SECONDS", 0.3)


@pytest.fixture
def asked() -> list[int]:
    """Holds something as soon as the end is asked for."""
    return []


@pytest.fixture
def watch(gate: threading.Event, asked: list[int]) -> Iterator[Watch]:
    task = Resident("The task", lambda: gate.wait() and False, pause=60)
    task.start()
    watch = Watch(lambda: len(asked), lambda: [task], may_exit=False)
    watch.start()
    yield watch
    watch.close()
    task.stop()


class TestWatch:
    def test_stops_what_is_to_be_stopped(self, watch: Watch, asked: list[int]):
        stopped = threading.Event()
        watch.when_asked(stopped.set)
        assert not stopped.is_set()

        asked.append(1)

        assert stopped.wait(5)

    def test_stops_at_once_what_begins_later(self, watch: Watch, asked: list[int]):
        stopped = threading.Event()
        asked.append(1)
        assert watch.asked.wait(5)

        watch.when_asked(stopped.set)

        assert stopped.is_set()

    def test_names_a_call_that_does_not_return(self, watch: Watch, asked: list[int], caplog: pytest.LogCaptureFixture):
        asked.append(1)

        wait_until(lambda: SAID in caplog.text)
        assert "The task has not returned from outbox.relay.resident.Resident.run() (it waits in " in caplog.text

    def test_says_nothing_when_all_came_to_its_end(self, watch: Watch, asked: list[int], caplog: pytest.LogCaptureFixture):
        asked.append(1)
        assert watch.asked.wait(5)

        watch.close()
        watch.join(5)

        assert SAID not in caplog.text

    def test_waits_for_a_handler(self, watch: Watch, asked: list[int], caplog: pytest.LogCaptureFixture):
        with handler_runs():
            asked.append(1)
            wait_until(lambda: "is waited for" in caplog.text)
            assert SAID not in caplog.text

        wait_until(lambda: SAID in caplog.text)

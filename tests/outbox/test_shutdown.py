"""Which exceptions end a process, and shutdown in pools whose process runs other tasks. More: tests/journeys/shutdown/."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from outbox import shutdown
from outbox.relay.loops import RepeatingThread
from outbox.shutdown import GIVEN_UP, ShutdownWatch, give_up_handler, handler_runs, is_shutdown
from tests.waiting import wait_until

SAID = "cannot end before it returns"


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "LIMIT_SECONDS", 0.3)


@pytest.fixture
def asked() -> list[int]:
    """Waits in `stop` as soon as the end is requested."""
    return []


@pytest.fixture
def watch(gate: threading.Event, asked: list[int]) -> Iterator[ShutdownWatch]:
    task = RepeatingThread("The task", lambda: gate.wait() and False, pause=60)
    task.start()
    watch = ShutdownWatch(lambda: len(asked), lambda: [task], may_exit=False)
    watch.start()
    yield watch
    watch.close()
    task.stop()


class TestWatch:
    def test_stops_what_is_to_be_stopped(self, watch: ShutdownWatch, asked: list[int]):
        stopped = threading.Event()
        watch.on_request(stopped.set)
        assert not stopped.is_set()

        asked.append(1)

        assert stopped.wait(5)

    def test_stops_at_once_what_begins_later(self, watch: ShutdownWatch, asked: list[int]):
        stopped = threading.Event()
        asked.append(1)
        assert watch.requested.wait(5)

        watch.on_request(stopped.set)

        assert stopped.is_set()

    def test_names_a_call_that_does_not_return(self, watch: ShutdownWatch, asked: list[int], caplog: pytest.LogCaptureFixture):
        asked.append(1)

        wait_until(lambda: SAID in caplog.text)
        assert "The task has not returned from outbox.relay.loops.RepeatingThread.run() (it waits in " in caplog.text

    def test_says_nothing_when_all_came_to_its_end(
        self, watch: ShutdownWatch, asked: list[int], caplog: pytest.LogCaptureFixture
    ):
        asked.append(1)
        assert watch.requested.wait(5)

        watch.close()
        watch.join(5)

        assert SAID not in caplog.text

    def test_waits_for_a_handler(self, watch: ShutdownWatch, asked: list[int], caplog: pytest.LogCaptureFixture):
        with handler_runs():
            asked.append(1)
            wait_until(lambda: "Waiting for a handler" in caplog.text)
            assert SAID not in caplog.text

        wait_until(lambda: SAID in caplog.text)


@pytest.fixture
def stubborn(gate: threading.Event) -> Iterator[threading.Thread]:
    """A handler that was given up, and runs until the test ends."""
    began = threading.Event()

    def work() -> None:
        with handler_runs():
            began.set()
            gate.wait()

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(5)
    give_up_handler(thread.ident or 0)
    yield thread
    gate.set()
    thread.join()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which this process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.mark.usefixtures("stubborn")
class TestAHandlerThatWasGivenUp:
    def test_stops_no_task_of_a_process_that_runs_others(self):
        looks: list[None] = []

        def look() -> int:
            looks.append(None)
            return 0

        watch = ShutdownWatch(look, list, may_exit=False)

        watch.start()
        wait_until(lambda: len(looks) >= 3)

        assert not watch.requested.is_set()
        watch.close()

    def test_ends_its_process_though_another_handler_runs_on(self, exits: list[int], monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(shutdown, "OTHERS_SECONDS", 1.0)
        watch = ShutdownWatch(lambda: 0, list)

        with handler_runs():
            watch.start()
            wait_until(lambda: exits)

        assert exits == [GIVEN_UP]
        watch.close()

    def test_ends_its_process_when_the_other_handlers_have_returned(self, exits: list[int]):
        watch = ShutdownWatch(lambda: 0, list)
        with handler_runs():
            watch.start()
            assert watch.requested.wait(5)
            assert not exits

        wait_until(lambda: exits)

        assert exits == [GIVEN_UP]
        watch.close()


def raised_by(act: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        act()
    return raised.value


@pytest.fixture
def on_signal(monkeypatch) -> Callable[[], object]:
    """Install a signal handler that exits, as in a child of Celery's prefork pool; return a function that sends the signal."""

    def exit_now(signum, frame):
        sys.exit(-(256 - signum))

    before = signal.signal(signal.SIGUSR1, exit_now)
    yield lambda: (os.kill(os.getpid(), signal.SIGUSR1), threading.Event().wait(5))
    signal.signal(signal.SIGUSR1, before)


class TestIsEndOfProcess:
    def test_is_an_exit_that_a_signal_asked_for(self, on_signal):
        assert is_shutdown(raised_by(on_signal), is_requested=False)

    def test_is_any_exit_once_the_end_was_asked_for(self):
        assert is_shutdown(raised_by(sys.exit), is_requested=True)

    def test_is_no_exit_of_the_handlers_own(self):
        assert not is_shutdown(raised_by(sys.exit), is_requested=False)

    def test_is_an_interrupt_of_the_main_thread_only(self):
        found = []
        thread = threading.Thread(target=lambda: found.append(is_shutdown(KeyboardInterrupt(), is_requested=False)))
        thread.start()
        thread.join()

        assert found == [False]
        assert is_shutdown(KeyboardInterrupt(), is_requested=False)

    @pytest.mark.parametrize("error", [ValueError("no"), GeneratorExit()])
    def test_is_nothing_else(self, error):
        assert not is_shutdown(error, is_requested=True)

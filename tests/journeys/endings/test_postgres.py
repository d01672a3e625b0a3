"""SIGTERM and SIGINT while PostgreSQL is away."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

import pytest

from outbox.ending import GIVEN_UP, UNFINISHED
from tests.journeys.endings import TIME_LIMIT
from tests.journeys.endings.scene import LIMIT, Scene, end
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

COMMANDS = ["outbox_relay", "outbox_consume"]


@pytest.fixture(params=COMMANDS)
def busy(request: pytest.FixtureRequest, scene: Scene) -> subprocess.Popen[str]:
    """A relay or a consumer with much to do."""
    scene.publish(400)
    relay = scene.start("django", "outbox_relay")
    if request.param == "outbox_relay":
        wait_until(scene.sent)
        return relay
    wait_until(lambda: scene.sent() == 400)
    end(relay)
    consumer = scene.start("django", "outbox_consume")
    wait_until(scene.handled)
    return consumer


@pytest.fixture(params=COMMANDS)
def idle(request: pytest.FixtureRequest, scene: Scene) -> subprocess.Popen[str]:
    """A relay or a consumer that waits."""
    process = scene.start("django", request.param)
    is_relay = request.param == "outbox_relay"
    wait_until(lambda: scene.backends("outbox listener" if is_relay else "outbox embedded broker"))
    return process


class TestKilledPostgres:
    def test_ends_all_at_once_that_wait_for_it(self, scene: Scene, busy: subprocess.Popen[str]):
        scene.server.kill()
        try:
            wait_until(lambda: " s: " in scene.said(busy))

            seconds = end(busy, signal.SIGINT)
        finally:
            scene.server.start()

        assert seconds < LIMIT
        assert busy.returncode == 0

    def test_may_go_at_the_same_moment(self, scene: Scene, busy: subprocess.Popen[str]):
        scene.server.kill()
        try:
            seconds = end(busy)
        finally:
            scene.server.start()

        assert seconds < LIMIT
        assert busy.returncode == 0


class TestFrozenPostgres:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_is_left_in_the_middle_of_a_call(self, scene: Scene, busy: subprocess.Popen[str], number: int):
        scene.server.freeze()
        seconds = end(busy, number)
        scene.server.thaw()

        assert seconds < LIMIT
        assert busy.returncode == UNFINISHED
        assert "has not returned from outbox." in scene.said(busy)
        assert "Nothing is lost" in scene.said(busy)

    def test_is_left_by_those_that_were_idle(self, scene: Scene, idle: subprocess.Popen[str]):
        scene.server.freeze()
        seconds = end(idle)
        scene.server.thaw()

        assert seconds < LIMIT
        assert "Traceback" not in scene.said(idle)

    def test_has_others_take_up_what_was_left(self, scene: Scene, busy: subprocess.Popen[str]):
        scene.server.freeze()
        end(busy)
        scene.server.thaw()

        scene.start("django", "outbox_relay")
        scene.start("django", "outbox_consume", "--threads", "2")

        wait_until(lambda: scene.sent() == scene.handled() == 400, 60)


class TestWellPostgres:
    def test_has_all_end_as_told(self, scene: Scene, busy: subprocess.Popen[str]):
        seconds = end(busy)

        assert seconds < LIMIT
        assert busy.returncode == 0
        assert scene.said(busy) == ""
        assert "sent in" in (said := busy.stdout.read()) or "handled" in said


class TestHandlerThatTakesLong:
    @pytest.fixture
    def handling(self, scene: Scene) -> tuple[subprocess.Popen[str], Callable[[], None]]:
        """A consumer whose handler runs until it is let go."""
        gate = scene.folder / "gate"
        gate.touch()
        scene.start("django", "outbox_relay")
        consumer = scene.start("django", "outbox_consume")
        scene.publish(waits_while=str(gate))
        wait_until(gate.with_suffix(".begun").exists)
        return consumer, gate.unlink

    def test_is_waited_for(self, scene: Scene, handling: tuple[subprocess.Popen[str], Callable[[], None]]):
        consumer, open_gate = handling
        consumer.send_signal(signal.SIGTERM)
        wait_until(lambda: "Waiting for a handler" in scene.said(consumer))
        assert consumer.poll() is None

        open_gate()

        assert consumer.wait(LIMIT) == 0
        assert scene.handled() == 1

    def test_is_left_at_the_second_signal(self, scene: Scene, handling: tuple[subprocess.Popen[str], Callable[[], None]]):
        consumer, _ = handling
        consumer.send_signal(signal.SIGTERM)
        wait_until(lambda: "Waiting for a handler" in scene.said(consumer))

        seconds = end(consumer)

        assert seconds < 1
        assert consumer.returncode == UNFINISHED
        assert scene.handled() == 0

    def test_ends_its_process_if_it_does_not_end_at_its_time_limit(self, scene: Scene):
        gate = scene.folder / "gate"
        gate.touch()
        scene.start("django", "outbox_relay")
        stubborn = scene.start("django", "outbox_consume", **{TIME_LIMIT: "0.5"})
        scene.publish(waits_while=str(gate), catches=True)
        wait_until(gate.with_suffix(".begun").exists)
        stubborn.send_signal(signal.SIGTERM)

        code = stubborn.wait(30)

        assert code == GIVEN_UP
        assert "work of group 'endings' still runs 10 s after its time_limit of 0.5 s" in scene.said(stubborn)
        assert scene.handled() == 0
        gate.unlink()
        scene.start("django", "outbox_consume")
        wait_until(scene.handled)

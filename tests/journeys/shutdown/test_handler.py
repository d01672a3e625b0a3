"""SIGTERM while a handler runs."""

import signal
import subprocess
from collections.abc import Callable

import pytest

from outbox.shutdown import GIVEN_UP, UNFINISHED
from tests.journeys.shutdown import TIME_LIMIT
from tests.journeys.shutdown.scene import LIMIT, Scene, end
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


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
        assert "work of group 'shutdown' still runs 10 s after its time_limit of 0.5 s" in scene.said(stubborn)
        assert scene.handled() == 0
        gate.unlink()
        scene.start("django", "outbox_consume")
        wait_until(scene.handled)

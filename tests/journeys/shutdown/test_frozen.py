"""SIGTERM and SIGINT while PostgreSQL does not answer."""

import signal
import subprocess

import pytest

from outbox.shutdown import UNFINISHED
from tests.journeys.shutdown.scene import LIMIT, Scene, end
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


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

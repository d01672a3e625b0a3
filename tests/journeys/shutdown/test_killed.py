"""SIGTERM and SIGINT while PostgreSQL is gone, and while it is well."""

import signal
import subprocess

import pytest

from tests.journeys.shutdown.scene import LIMIT, Scene, end
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


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


class TestWellPostgres:
    def test_has_all_end_as_told(self, scene: Scene, busy: subprocess.Popen[str]):
        seconds = end(busy)

        assert seconds < LIMIT
        assert busy.returncode == 0
        assert scene.said(busy) == ""
        assert "sent in" in (said := busy.stdout.read()) or "handled" in said

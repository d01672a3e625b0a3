"""Celery's worker is told to end while a child of its pool is in a task of ours."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.journeys.shutdown.scene import LIMIT, Scene, end, seconds_until
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # a busy machine takes a minute

WORKER = ["celery", "--app", "project", "worker", "--queues", "outbox", "--concurrency", "1", "--loglevel", "WARNING"]
ALONE = ["--without-gossip", "--without-mingle", "--without-heartbeat"]

MANY = 6000  # so many are under way for longer than a task may take to end
CELERY_SECONDS = 20.0  # that the worker itself may take to end on a busy machine

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(scene: Scene) -> Start:
    """Start a worker, and have it relay."""

    def start(pool: str = "prefork", task: str = "relay") -> subprocess.Popen[str]:
        folder = str(scene.folder / "celery")
        worker = scene.start(*WORKER, *ALONE, "--pool", pool, CELERY_FILES_DIR=folder)
        scene.start("celery", "--app", "project", "call", f"outbox.tasks.{task}", "--queue", "outbox", CELERY_FILES_DIR=folder)
        return worker

    return start


def children(process: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


class TestRelayTask:
    @pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
    def test_ends_though_there_is_more_to_do(self, scene: Scene, start: Start, pool: str):
        scene.order(MANY)
        worker = start(pool)
        wait_until(scene.sent)

        seconds = end(worker)

        assert seconds < LIMIT + CELERY_SECONDS
        assert worker.returncode == 0
        assert scene.sent() < MANY

    @pytest.mark.parametrize("task", ["relay", "sweep"])
    def test_leaves_a_call_that_does_not_return(self, scene: Scene, start: Start, task: str):
        scene.order(MANY)
        worker = start(task=task)
        wait_until(scene.sent)
        [child] = children(worker)

        scene.server.freeze()
        worker.terminate()
        seconds = seconds_until(iter(lambda: not Path(f"/proc/{child}/stat").exists(), None))
        worker.wait(30)
        scene.server.thaw()

        assert seconds < LIMIT
        assert "has not returned from outbox." in scene.said(worker)

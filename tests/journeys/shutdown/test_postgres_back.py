"""The first message after PostgreSQL is back."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.journeys.shutdown.scene import LIMIT, Scene, Server, seconds_until, wait
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

AWAY_SECONDS = 8.0  # by then every back-off has reached its limit


@pytest.fixture
def processes(scene: Scene) -> list[subprocess.Popen[str]]:
    """A relay and a consumer that have had something to do."""
    found = [scene.start("django", "outbox_relay"), scene.start("django", "outbox_consume")]
    scene.publish()
    wait_until(lambda: scene.handled() == 1)
    return found


@contextmanager
def killed(server: Server) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


@pytest.mark.parametrize("away", [killed, frozen])
class TestFirstMessage:
    def test_goes_at_once(
        self,
        scene: Scene,
        processes: list[subprocess.Popen[str]],
        away: Callable[[Server], AbstractContextManager[None]],
    ):
        with away(scene.server):
            scene.order()
            wait(AWAY_SECONDS, *processes)

        seconds = seconds_until(iter(lambda: scene.handled() == 2, None))

        print(f"handled after {seconds:.1f} s")  # noqa: T201
        assert seconds < LIMIT

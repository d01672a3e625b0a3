"""Tasks through the outbox with real processes, each of which is killed at its worst moment."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kombu import Connection

from outbox.models import MessageState
from project.servers.rabbitmq import RabbitMQ
from project.servers.redis import Redis
from tests.database_url import environment_of
from tests.waiting import wait_until

Server = Redis | RabbitMQ

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180), pytest.mark.slow]

COUNT = 20


def _where_it_is(kind: type[Server], mark: pytest.MarkDecorator) -> object:
    missing = pytest.mark.skipif(not kind.is_here(), reason=f"There is no {kind.package}: apt-get install {kind.package}.")
    return pytest.param(kind, marks=[mark, missing], id=kind.package)


@pytest.fixture(scope="module", params=[_where_it_is(Redis, pytest.mark.redis), _where_it_is(RabbitMQ, pytest.mark.rabbitmq)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with request.param(tmp_path_factory.mktemp("server")) as server:
        yield server


class Stage:
    """The journey's processes, and what its tasks have done."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        told = {"CELERY_BROKER_URL": server.url, "JOURNEY_RUNS": str(folder / "runs")}
        self.environment = environment_of("tests.journeys.celery_tasks.settings", **told)

    def publish(self, first: int, count: int = COUNT, *flags: str) -> list[str]:
        """Start a process that sends tasks; return their ids."""
        command = [sys.executable, "-m", "tests.journeys.celery_tasks.publisher", str(first), str(count), *flags]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == (-signal.SIGKILL if "killed" in flags else 0), done.stderr
        return done.stdout.split()

    @contextmanager
    def relay(self, failpoints: str = "") -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "django", "outbox_relay", "--broker", "celery"]
        environment = {**self.environment, "OUTBOX_FAILPOINTS": failpoints}
        with self._process("relay", command, environment) as process:
            yield process

    @contextmanager
    def worker(self) -> Iterator[None]:
        command = [sys.executable, "-m", "celery", "--app", "tests.journeys.celery_tasks.app", "worker", "--concurrency", "1"]
        with self._process("worker", [*command, "--pool", "solo"], self.environment):
            yield

    @contextmanager
    def _process(self, name: str, command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield process
            process.terminate()
            process.wait(60)
        finally:
            process.kill()
            process.wait()

    def sent(self) -> int:
        return MessageState.objects.filter(topic="celery-tasks", state="sent").count()

    def runs(self) -> Counter[str]:
        """Return how often each task ran, by id and number."""
        path = Path(self.environment["JOURNEY_RUNS"])
        return Counter(path.read_text().splitlines() if path.exists() else ())

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@pytest.fixture
def stage(server: Server, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(server, tmp_path)
    yield stage
    with Connection(server.url) as left:
        left.default_channel.queue_purge("celery")
    for log in tmp_path.glob("*.log"):
        print(f"{log.name}:\n{log.read_text()[-4000:]}")  # noqa: T201  (shown where the test failed)


def lines(ids: list[str], first: int = 0) -> set[str]:
    return {f"{one} {number}" for number, one in enumerate(ids, first)}


class TestTasks:
    def test_run_once_though_their_process_dies_right_after_the_commit(self, stage: Stage):
        ids = stage.publish(0, COUNT, "killed")

        with stage.relay(), stage.worker():
            wait_until(lambda: len(stage.runs()) == COUNT, seconds=30)
            wait_until(lambda: stage.sent() == COUNT)

        assert stage.runs() == Counter(lines(ids))

    def test_run_once_though_their_relay_dies_before_it_sends(self, stage: Stage):
        ids = stage.publish(0)
        with stage.relay("relay.after_claim=kill") as killed:
            assert killed.wait(60) == -signal.SIGKILL

        with stage.relay(), stage.worker():
            wait_until(lambda: stage.sent() == COUNT, seconds=30)
            wait_until(lambda: len(stage.runs()) == COUNT)

        assert stage.runs() == Counter(lines(ids))

    def test_run_at_least_once_though_their_relay_dies_between_send_and_mark(self, stage: Stage):
        ids = stage.publish(0)
        with stage.relay("relay.after_send=kill") as killed:
            assert killed.wait(60) == -signal.SIGKILL

        with stage.relay(), stage.worker():
            wait_until(lambda: stage.sent() == COUNT, seconds=30)
            wait_until(lambda: sum(stage.runs().values()) == 2 * COUNT)

        assert set(stage.runs()) == lines(ids)  # of the same ids: a task can tell that it ran before

    def test_wait_for_a_relay_that_is_started_again(self, stage: Stage):
        first = stage.publish(0)
        with stage.relay(), stage.worker():
            wait_until(lambda: stage.sent() == COUNT, seconds=30)
        second = stage.publish(COUNT)

        with stage.relay(), stage.worker():
            wait_until(lambda: len(stage.runs()) == 2 * COUNT, seconds=30)

        assert stage.runs() == Counter(lines(first) | lines(second, COUNT))

    def test_outlast_a_server_that_is_killed_in_the_middle(self, stage: Stage):
        with stage.relay() as relay:
            first = stage.publish(0)
            wait_until(lambda: stage.sent() == COUNT, seconds=30)
            stage.server.kill()
            second = stage.publish(COUNT, 300)
            wait_until(lambda: "gets no answer" in stage.log("relay"), seconds=30)
            stage.server.start()
            wait_until(lambda: stage.sent() == COUNT + 300, seconds=30)
            assert relay.poll() is None

        with stage.worker():
            wait_until(lambda: len(stage.runs()) == COUNT + 300, seconds=30)

        assert set(stage.runs()) == lines(first) | lines(second, COUNT)
        assert not MessageState.objects.filter(state="dead").exists()

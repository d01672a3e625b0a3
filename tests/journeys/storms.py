"""What storms have in common: processes that are kept running, and acts that hurt them and their servers by chance."""

import abc
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Protocol

import pytest
from amqp.exceptions import AMQPError

from project.servers.program import ServerError
from tests.journeys.outcome import Outcome
from tests.journeys.processes import Processes, send
from tests.waiting import wait_until

NODES = int(os.environ.get("STORM_NODES", 1))
START_SECONDS = 240  # until all processes work

CELERY = ["celery", "-A", "project", "worker", "--queues", "outbox,shop", "--concurrency", "3", "--loglevel", "WARNING"]
CELERY += ["--without-gossip", "--without-mingle", "--without-heartbeat"]

FAILURES = (subprocess.SubprocessError, AMQPError, OSError, LookupError, ServerError, AssertionError)  # of an act

Acts = dict[str, tuple[int, Callable[[], object]]]  # with their weights


def seconds_of_storm(default: float) -> float:
    return float(os.environ.get("STORM_SECONDS", default))


def marks(seconds: float, patience: float) -> list[pytest.MarkDecorator]:
    """Return the marks of a storm's test."""
    timeout = pytest.mark.timeout(2 * seconds + patience + 300)
    return [pytest.mark.slow, pytest.mark.django_db(transaction=True), timeout]


class Storm(abc.ABC):
    """
    Keeps processes running, and hurts them and their servers.

    Args:
        told: the variables in the environment of its processes.
        seed: of the chance by which it acts.
    """

    kinds: ClassVar[dict[str, int]]  # of processes, and how many of each there are
    publishers: ClassVar[tuple[str, ...]] = ("publisher",)  # kinds that publish
    publisher: ClassVar[str]  # the module by which they do, see publish.py
    pause: ClassVar[tuple[float, float]] = (1.0, 5.0)  # seconds between two acts
    freezes: ClassVar[tuple[float, ...]] = (1, 3, 12)  # seconds; the last one is noticed by a server
    first: ClassVar[tuple[str, ...]] = ()  # acts that come before others

    def __init__(self, processes: Processes, told: Mapping[str, str], seed: str) -> None:
        self.processes = processes
        self.chance = random.Random(seed)
        self.acts: Counter[str] = Counter()
        self.settled_after = 0.0  # seconds
        self.nodes: Sequence[Any] = ()  # that are started again where a busy machine took too long for their last start
        self._told = told
        self._numbers = iter(range(0, 2_000_000_000, 1_000_000))
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    @abc.abstractmethod
    def list_acts(self) -> Acts: ...

    @abc.abstractmethod
    def is_under_way(self) -> object:
        """Return whether all processes work."""

    @abc.abstractmethod
    def is_settled(self) -> bool:
        """Return whether nothing is left to do."""

    def command(self, kind: str) -> list[str]:
        """Return the command of a process, behind `python -m`."""
        match kind:
            case "relay":
                return ["django", "outbox_relay"]
            case "celery":
                return [*CELERY, *self.beat()]
            case _:
                return ["tests.journeys.publish", self.publisher, str(next(self._numbers))]

    def beat(self) -> list[str]:
        return ["--beat", "--schedule", str(self.processes.folder / f"beat-{self.chance.randrange(10**9)}")]

    def begin(self) -> None:
        """Start all processes."""
        self.running = {f"{kind} {nth}": self.start(kind) for kind, count in self.kinds.items() for nth in range(count)}

    def play(self, seconds: float) -> None:
        """Hurt by chance for so long."""
        wait_until(self.is_under_way, START_SECONDS)
        self.hurt(self.list_acts(), time.monotonic() + seconds)

    def hurt(self, acts: Acts, ends_at: float) -> None:
        """Do each act once, then by weight, and again, until a time: so a short storm has all of it."""
        queue: list[str] = []
        while time.monotonic() < ends_at:
            time.sleep(self.chance.uniform(*self.pause))
            if not queue:
                each = sorted(self.chance.sample(list(acts), len(acts)), key=lambda name: name not in self.first)
                more = [name for name, (weight, _) in acts.items() for _ in range(weight - 1)]
                queue = [*each, *self.chance.sample(more, len(more))]
            self._do(name := queue.pop(0), acts[name][1])
            self.keep_running()

    def calm(self) -> None:
        """Publish no more, and start again what died by itself."""
        for name in [name for name in self.running if _kind(name) in self.publishers]:
            self.end(name)
            del self.running[name]
        self.keep_running()
        say("all is calm")

    def settle(self, patience: float) -> None:
        """Wait until nothing is left to do, at most for the given seconds."""

        def is_settled() -> bool:
            self.keep_running()
            return self.is_settled()

        began_at = time.monotonic()
        with suppress(AssertionError):
            wait_until(is_settled, patience)
        self.settled_after = time.monotonic() - began_at

    def close(self) -> None:
        print(self.processes.logs())  # noqa: T201  (pytest shows it where the test failed)
        self.processes.close()

    def start(self, kind: str) -> subprocess.Popen[bytes]:
        return self.processes.start(*self.command(kind), **self._told)

    def end(self, name: str) -> None:
        send(self.running[name], signal.SIGKILL)
        self.running[name].wait()

    def keep_running(self) -> None:
        for node in self.nodes:
            if not node.is_running:
                node.start()
        for name, process in self.running.items():
            if process.poll() is not None:
                self.running[name] = self.start(_kind(name))

    def kill(self, *kinds: str) -> None:
        """Kill a process of one of these kinds, by default of any, and start it again."""
        self.end(name := self._choose(kinds))
        self.running[name] = self.start(_kind(name))

    def stop(self, *kinds: str) -> None:
        send(self.running[self._choose(kinds)], signal.SIGTERM)

    def freeze(self, *kinds: str) -> None:
        with self.frozen(self._choose(kinds)):
            time.sleep(self.chance.choice(self.freezes))

    @contextmanager
    def frozen(self, *names: str) -> Iterator[None]:
        for name in names:
            send(self.running[name], signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                send(self.running[name], signal.SIGCONT)

    def restart(self, server: Any) -> None:
        """Kill a server, and start it a moment later."""
        server.kill()
        time.sleep(self.chance.uniform(0, 3))
        server.start()

    def freeze_server(self, server: Any) -> None:
        server.freeze()
        try:
            time.sleep(self.chance.choice(self.freezes))
        finally:
            server.thaw()

    def _choose(self, kinds: Sequence[str]) -> str:
        return self.chance.choice([name for name in self.running if not kinds or _kind(name) in kinds])

    def _do(self, name: str, act: Callable[[], object]) -> None:
        say(name)
        try:
            act()
        except FAILURES as error:
            say(f"{name} did not work: {str(error)[:300]}")
        else:
            self.acts[name] += 1


class Count(Protocol):
    """What a storm has left behind, once it is calm."""

    def report(self) -> dict[str, Any]: ...
    def outcome(self, seconds: float) -> Outcome: ...


def show(count: Count, seconds: float) -> None:
    """Print the figures, and write them for the report."""
    print("\nSTORM", json.dumps(count.report(), indent=1))  # noqa: T201  (with -s)
    count.outcome(seconds).write()


def _kind(name: str) -> str:
    return name.rpartition(" ")[0]


def say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", flush=True)  # noqa: T201

"""
A storm on Celery's tasks: the server, relays, workers and publishers are hurt for minutes, by chance.

It is counted in tables that transactions and tasks write. What a Redis loses that fails over is its own: it confirms what its
replica does not have yet. That is counted apart.
"""

from __future__ import annotations

import abc
import itertools
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import amqp
from amqp.exceptions import AMQPError
from django.db import connection

from project.servers.program import ServerError
from project.servers.rabbitmq import RabbitMQ
from project.servers.redis import Redis
from tests.journeys.celery_storm.given import GOOD, POISON, POISON_TYPE, VARIABLE
from tests.journeys.outcome import Outcome
from tests.journeys.processes import Processes, send
from tests.waiting import wait_until

PAUSE = (1.0, 4.0)  # seconds between two acts

TABLES = """
CREATE TABLE storm_published (number int PRIMARY KEY, kind text, task_id text);
CREATE TABLE storm_run (number int, is_early boolean)
"""
DROP = "DROP TABLE storm_published, storm_run"

APP = "tests.journeys.celery_storm.app"
WORKER = ["celery", "-A", APP, "worker", "--concurrency", "2", "--loglevel", "WARNING"]
WORKER += ["--without-gossip", "--without-mingle"]

KINDS = {"relay": 1, "celery": 1, "worker": 2, "publisher": 2}

Act = Callable[[], object]

Acts = dict[str, tuple[int, Act]]


class Server(abc.ABC):
    """
    Celery's broker, and what is done to it.

    Args:
        refusal: what it says of a poisonous task.
        write: the URL to which tasks are sent.
        loses_what_is_taken: whether Celery's worker loses a task that it takes while its connection is cut.
        without_relays: returns a block during which no relay runs.
    """

    server: RabbitMQ | Redis
    refusal: str
    write: str
    loses_what_is_taken = False

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.without_relays: Callable[[], AbstractContextManager[None]] = nullcontext
        self.failed_over_at: list[float] = []

    @abc.abstractmethod
    def acts(self) -> Acts: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def was_failing_over(self, at: float) -> bool:
        """Return whether the server was failing over at a time."""
        return any(abs(at - one) < NEAR_SECONDS for one in self.failed_over_at)

    def kill(self) -> None:
        self.server.kill()
        time.sleep(self.chance.uniform(0, 3))
        self.server.start()

    def freeze(self) -> None:
        self.server.freeze()
        try:
            time.sleep(self.chance.choice([1, 4, 9]))
        finally:
            self.server.thaw()


class OnRabbitMQ(Server):
    """RabbitMQ, where a queue's exchange has a type that it does not know."""

    refusal = f"unknown exchange type '{POISON_TYPE}'"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(chance)
        self.server = RabbitMQ(folder / "rabbitmq").start()
        self.write = self.server.url

    def acts(self) -> Acts:
        return {
            "kill the server": (2, self.kill),
            "freeze the server": (2, self.freeze),
            "alarm": (2, self._alarm),
            "close connections": (2, lambda: self.server.control("close_all_connections", "a storm")),
            "delete the queue": (2, self._delete),
        }

    def close(self) -> None:
        self.server.stop()

    def _alarm(self) -> None:
        self.server.control("set_vm_memory_high_watermark", "0.0001")
        try:
            time.sleep(self.chance.choice([2, 5, 10]))
        finally:
            wait_until(self._is_lifted, 180)

    def _is_lifted(self) -> bool:
        with suppress(subprocess.SubprocessError):  # rabbitmqctl takes long on a busy machine
            self.server.control("set_vm_memory_high_watermark", "0.6")
            return True
        return False

    def _delete(self) -> None:
        """Delete the tasks' queue while no relay sends and no worker holds a task, so that nothing is lost with it."""
        with self.without_relays():
            wait_until(self._is_empty, 15)
            with amqp.Connection(self.server.address) as one, one.channel() as channel:
                channel.queue_delete(GOOD)

    def _is_empty(self) -> bool:
        rows = self.server.control("list_queues", "name", "messages", "--quiet", "--no-table-headers").splitlines()
        return f"{GOOD}\t0" in rows


class OnRedis(Server):
    """Two Redis, of which one follows the other; the user who sends may not touch the key of a queue."""

    refusal = "no permissions to access one of the keys"
    loses_what_is_taken = True  # kombu takes it off the list before it notes that it holds it: celery/kombu#1733

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(chance)
        self.server, self.other = Redis(folder / "one").start(), Redis(folder / "two").start()
        self.write = self.server.url.replace("redis://", "redis://shop:secret@")
        for one in (self.server, self.other):
            self._add_user(one)
        self.other.follow(self.server)

    def acts(self) -> Acts:
        return {
            "kill the server": (2, self._kill),
            "freeze the server": (2, self.freeze),
            "fail over": (2, self._fail_over),
            "fail over after a kill": (2, self._fail_over_after_kill),
            "full memory": (1, self._fill),
        }

    def close(self) -> None:
        self.server.stop()
        self.other.stop()

    def _add_user(self, server: Redis) -> None:
        server.say(f"ACL SETUSER shop on >secret +@all &* ~{GOOD}* ~outbox* ~_kombu* ~unacked* ~celery* ~*pidbox*")

    def _kill(self) -> None:
        self.kill()
        self._add_user(self.server)

    def _wait_for_replica(self) -> None:
        wait_until(lambda: "master_link_status:up" in self.other.say("INFO replication"), 20)

    def _fail_over(self) -> None:
        """Let the replica take over while the old one lives on as its replica: clients that stay there are told READONLY."""
        self._wait_for_replica()
        self.failed_over_at.append(time.time())
        self.other.take_over()
        self.other.swap_ports(self.server)
        self.server.follow(self.other)
        self.server, self.other = self.other, self.server

    def _fail_over_after_kill(self) -> None:
        self._wait_for_replica()
        self.failed_over_at.append(time.time())
        old, port = self.server, self.server.port
        old.kill()
        time.sleep(self.chance.uniform(0, 2))
        self.other.take_over()
        free = self.other.port
        self.other.listen_at(port)
        self.server, self.other = self.other, old
        old.port = free
        old.start()
        self._add_user(old)
        old.follow(self.server)

    def _fill(self) -> None:
        self.server.say("CONFIG SET maxmemory 1")
        try:
            time.sleep(self.chance.choice([2, 5]))
        finally:
            self.server.say("CONFIG SET maxmemory 0")


class Storm:
    """
    Keeps processes running, and hurts them and Celery's broker.

    Args:
        folder: for logs.
    """

    def __init__(self, kind: type[OnRabbitMQ] | type[OnRedis], folder: Path, seed: str) -> None:
        self.chance = random.Random(seed)
        self.server = kind(folder, self.chance)
        self.server.without_relays = lambda: self._frozen(
            *(name for name in self.running if name.startswith(("relay", "celery")))
        )
        self.processes = Processes(folder, "tests.journeys.celery_storm.settings")
        self.acts: Counter[str] = Counter()
        self.settled_after = 0.0  # seconds
        self._told = {VARIABLE: json.dumps({"read": self.server.server.url, "write": self.server.write})}
        self._names = itertools.count()
        self._numbers = iter(range(0, 2_000_000_000, 1_000_000))
        self.running = {f"{kind} {nth}": self._start(kind) for kind, count in KINDS.items() for nth in range(count)}

    def play(self, seconds: float) -> None:
        """Hurt by chance for so long, each time something else, so that a short storm has all of it."""
        acts: Acts = {"kill a process": (5, self._kill), "freeze a process": (3, self._freeze)} | self.server.acts()
        wait_until(lambda: len(_rows("SELECT 1 FROM storm_run LIMIT 20")) == 20, 90)
        ends_at = time.monotonic() + seconds
        queue: list[str] = []
        while time.monotonic() < ends_at:
            time.sleep(self.chance.uniform(*PAUSE))
            if not queue:  # one of each, then by weight
                queue = [name for name, (weight, _) in acts.items() for _ in range(weight - 1)]
                self.chance.shuffle(queue)
                queue = [*self.chance.sample(list(acts), k=len(acts)), *queue]
            name = queue.pop(0)
            _say(name)
            try:
                acts[name][1]()
            except (subprocess.SubprocessError, AMQPError, OSError, ServerError, AssertionError) as error:
                _say(f"{name} did not work: {str(error)[:300]}")
            else:
                self.acts[name] += 1
            self._keep_running()

    def calm(self) -> None:
        """Publish no more."""
        for name in [name for name in self.running if name.startswith("publisher")]:
            self._end(name)
            del self.running[name]
        self._keep_running()
        _say("all is calm")

    def settle(self, patience: float) -> None:
        """Wait until each good task has run and each poisonous one was refused; so long at most."""
        began_at = time.monotonic()
        with suppress(AssertionError):
            wait_until(self._is_settled, patience)
        self.settled_after = time.monotonic() - began_at

    def close(self) -> None:
        self.processes.close()
        self.server.close()

    def _is_settled(self) -> bool:
        self._keep_running()
        time.sleep(0.5)
        return not Count(self).wrong()

    def _kill(self) -> None:
        name = self.chance.choice([*self.running])
        self._end(name)
        self.running[name] = self._start(name.rpartition(" ")[0])

    def _freeze(self) -> None:
        with self._frozen(self.chance.choice([*self.running])):
            time.sleep(self.chance.choice([1, 3, 10]))

    def _start(self, kind: str) -> subprocess.Popen[bytes]:
        worker = [*WORKER, "--hostname", f"{next(self._names)}@storm"]  # RabbitMQ keeps a dead worker's own queue for a while
        match kind:
            case "relay":
                return self.processes.start("django", "outbox_relay", **self._told)
            case "celery":
                schedule = str(self.processes.folder / f"beat-{self.chance.randrange(10**9)}")
                return self.processes.start(*worker, "--beat", "--schedule", schedule, "--queues", "outbox", **self._told)
            case "worker":
                return self.processes.start(*worker, "--queues", GOOD, **self._told)
            case _:
                return self.processes.start("tests.journeys.celery_storm.publisher", str(next(self._numbers)), **self._told)

    def _end(self, name: str) -> None:
        send(self.running[name], signal.SIGKILL)
        self.running[name].wait()

    def _keep_running(self) -> None:
        for name, process in self.running.items():
            if process.poll() is not None:
                self.running[name] = self._start(name.rpartition(" ")[0])

    @contextmanager
    def _frozen(self, *names: str) -> Iterator[None]:
        for name in names:
            send(self.running[name], signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                send(self.running[name], signal.SIGCONT)


NEAR_SECONDS = 5  # around a fail-over: what was confirmed then may not have reached the replica

# What has become of each task; the key of a task's message is the id of the task.
STATES = """
SELECT task.number, kind, state, extract(epoch FROM sent_at)::float8, last_error
FROM storm_published task LEFT JOIN outbox_message_state ON key = task_id
"""


class Count:
    """What a storm has left behind."""

    def __init__(self, storm: Storm) -> None:
        self.storm = storm
        rows = _rows(STATES)
        self.published = {number for number, *_ in rows}
        self.runs: Counter[int] = Counter(number for (number,) in _rows("SELECT number FROM storm_run"))
        self.early = {number for (number,) in _rows("SELECT number FROM storm_run WHERE is_early")}
        self.ghosts = self.runs.keys() - self.published
        self.repeated = {number for number, times in self.runs.items() if times > 1}
        good = {number: sent_at for number, kind, state, sent_at, _ in rows if kind == GOOD and state == "sent"}
        poison = [(number, state, error) for number, kind, state, _, error in rows if kind == POISON]
        self.not_sent = {number: (state, error) for number, kind, state, _, error in rows if kind == GOOD and state != "sent"}
        self.refused = {number for number, state, error in poison if state != "sent" and storm.server.refusal in (error or "")}
        self.not_refused = {number: (state, error) for number, state, error in poison if number not in self.refused}
        missing = good.keys() - self.runs.keys()
        self.lost_at_fail_over = {number for number in missing if storm.server.was_failing_over(good[number])}
        self.lost = missing - self.lost_at_fail_over
        may_lose = sum(storm.acts.values()) if storm.server.loses_what_is_taken else 0
        self.lost_by_workers = self.lost if len(self.lost) <= may_lose else set()
        self.lost -= self.lost_by_workers

    def wrong(self) -> list[str]:
        """Return what is not as it should be, a line each."""
        found = [f"lost: {number}" for number in sorted(self.lost)]
        found += [f"ghost: {number}" for number in sorted(self.ghosts)]
        found += [f"too early: {number}" for number in sorted(self.early)]
        found += [f"not sent: {number} {why}" for number, why in self.not_sent.items()]
        found += [f"not refused with the server's words: {number} {why}" for number, why in self.not_refused.items()]
        return found

    def outcome(self, seconds: float) -> Outcome:
        """Return the figures of the report; what Redis or a worker loses by itself is not counted."""
        return Outcome(
            run="tasks",
            broker=f"celery on {type(self.storm.server).__name__.removeprefix('On')}",
            seconds=seconds,
            faults=self.storm.acts,
            messages=len(self.published),
            lost=len(self.lost) + len(self.not_sent),
            ghosts=len(self.ghosts),
            copies=len(self.repeated),
            applied_twice=None,
            out_of_order=None,
            settled_seconds=self.storm.settled_after,
        )

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "acts": dict(self.storm.acts),
            "seconds to settle": round(self.storm.settled_after),
            "committed": len(self.published),
            "poisonous, refused": len(self.refused),
            "lost": len(self.lost),
            "lost by Redis at a fail-over": len(self.lost_at_fail_over),
            "lost by workers, at most one an act": len(self.lost_by_workers),
            "ghosts": len(self.ghosts),
            "too early": len(self.early),
            "not sent": len(self.not_sent),
            "ran more than once": len(self.repeated),
        }


def _rows(statement: str, values: Any = None) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall()


def _say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", flush=True)  # noqa: T201

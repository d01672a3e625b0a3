"""
A storm on Celery's tasks: the server, relays, workers and publishers are hurt for minutes, by chance.

It is counted in tables that transactions and tasks write. What a Redis loses that fails over is its own: it confirms what its
replica does not have yet. That is counted apart.
"""

import abc
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import amqp

from project.servers.rabbitmq import RabbitMQ
from project.servers.redis import Redis
from tests.journeys import storms
from tests.journeys.celery_storm.given import GOOD, POISON, POISON_TYPE, VARIABLE
from tests.journeys.outcome import Outcome
from tests.journeys.processes import Processes
from tests.journeys.rabbitmq.storm import count_waiting, raise_alarm
from tests.journeys.storms import Acts
from tests.journeys.tables import rows
from tests.waiting import wait_until

TABLES = """
CREATE TABLE storm_published (number int PRIMARY KEY, kind text, task_id text);
CREATE TABLE storm_run (number int, is_early boolean)
"""

WORKER = ["celery", "-A", "tests.journeys.celery_storm.app", "worker", "--concurrency", "2", "--loglevel", "WARNING"]
WORKER += ["--without-gossip", "--without-mingle"]


class Server(abc.ABC):
    """
    Celery's broker, and what is done to it, each with its weight.

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

    def started_again(self) -> None:  # noqa: B027  (RabbitMQ keeps its users)
        """Repair what a server has lost with its memory."""


class OnRabbitMQ(Server):
    """RabbitMQ, where a queue's exchange has a type that it does not know."""

    refusal = f"unknown exchange type '{POISON_TYPE}'"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(chance)
        self.server = RabbitMQ(folder / "rabbitmq").start()
        self.write = self.server.url

    def acts(self) -> Acts:
        return {
            "broker without memory": (2, lambda: raise_alarm(self.server, self.chance.choice([2, 5, 10]))),
            "connections closed": (2, lambda: self.server.control("close_all_connections", "a storm")),
            "queue deleted": (2, self._delete),
        }

    def close(self) -> None:
        self.server.stop()

    def _delete(self) -> None:
        """Delete the tasks' queue while no relay sends and no worker holds a task, so that nothing is lost with it."""
        with self.without_relays():
            wait_until(lambda: count_waiting(self.server)[GOOD] == 0, 15)
            with amqp.Connection(self.server.address) as one, one.channel() as channel:
                channel.queue_delete(GOOD)


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
            "broker failed over": (2, self._fail_over),
            "broker killed, and failed over": (2, self._fail_over_after_kill),
            "broker without memory": (1, self._fill),
        }

    def close(self) -> None:
        self.server.stop()
        self.other.stop()

    def _add_user(self, server: Redis) -> None:
        server.say(f"ACL SETUSER shop on >secret +@all &* ~{GOOD}* ~outbox* ~_kombu* ~unacked* ~celery* ~*pidbox*")

    def started_again(self) -> None:
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


class Storm(storms.Storm):
    """
    A storm on one of the servers.

    Args:
        folder: for logs.
    """

    kinds = {"relay": 1, "celery": 1, "worker": 2, "publisher": 2}
    publisher = "tests.journeys.celery_storm.publisher"
    pause = (1.0, 4.0)
    freezes = (1, 4, 10)

    def __init__(self, kind: type[OnRabbitMQ] | type[OnRedis], folder: Path, seed: str) -> None:
        self.server = kind(folder, random.Random(seed))
        self.server.without_relays = lambda: self.frozen(*(name for name in self.running if name.startswith(("relay", "celery"))))
        told = {VARIABLE: json.dumps({"read": self.server.server.url, "write": self.server.write})}
        super().__init__(Processes(folder, "tests.journeys.celery_storm.settings"), told, seed)
        self._names = itertools.count()
        self.begin()

    def list_acts(self) -> Acts:
        return {
            "process killed": (5, self.kill),
            "process frozen": (3, self.freeze),
            "broker killed": (2, self._kill_server),
            "broker frozen": (2, lambda: self.freeze_server(self.server.server)),
            **self.server.acts(),
        }

    def command(self, kind: str) -> list[str]:
        worker = [*WORKER, "--hostname", f"{next(self._names)}@storm"]  # RabbitMQ keeps a dead worker's own queue for a while
        match kind:
            case "celery":
                return [*worker, *self.beat(), "--queues", "outbox"]
            case "worker":
                return [*worker, "--queues", GOOD]
            case _:
                return super().command(kind)

    def is_under_way(self) -> bool:
        return len(rows("SELECT 1 FROM storm_run LIMIT 20")) == 20

    def is_settled(self) -> bool:
        """Return whether each good task has run and each poisonous one was refused."""
        time.sleep(0.5)
        return not Count(self).wrong()

    def close(self) -> None:
        super().close()
        self.server.close()

    def _kill_server(self) -> None:
        self.restart(self.server.server)
        self.server.started_again()


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
        states = rows(STATES)
        self.published = {number for number, *_ in states}
        self.runs: Counter[int] = Counter(number for (number,) in rows("SELECT number FROM storm_run"))
        self.early = {number for (number,) in rows("SELECT number FROM storm_run WHERE is_early")}
        self.ghosts = self.runs.keys() - self.published
        self.repeated = {number for number, times in self.runs.items() if times > 1}
        good = {number: sent_at for number, kind, state, sent_at, _ in states if kind == GOOD and state == "sent"}
        poison = [(number, state, error) for number, kind, state, _, error in states if kind == POISON]
        self.not_sent = {number: (state, error) for number, kind, state, _, error in states if kind == GOOD and state != "sent"}
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

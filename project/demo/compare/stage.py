"""Set up the comparison: one database and one RabbitMQ for all ways, and a web server and workers for each way."""

from __future__ import annotations

import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg

from project.demo.brokers import UNSENT
from project.demo.compare import report
from project.demo.compare.course import Course
from project.demo.compare.kills import RELAY, ROUNDS, WEB, environment
from project.demo.compare.ways import OUTBOX, WAYS, Way
from project.demo.database import own_database
from project.demo.feed import Feed
from project.demo.interrupt import Interrupt
from project.demo.kills import Permits
from project.demo.processes import DemoError, Processes
from project.demo.report import Connection, number
from project.demo.screen import Screen
from project.demo.stage import MANAGE, listen, wait_for_shop
from project.servers.program import ServerError
from project.servers.rabbitmq import RabbitMQ
from project.shop.orders_file import Invoice

SETTINGS = "project.demo.compare.shop.settings"
UNFINISHED = f"SELECT {UNSENT} + (SELECT count(*) FROM outbox_batch WHERE state IN (0, 1, 2))"  # noqa: S608
SAFE_SECONDS = 20  # the timeout until RabbitMQ's queues would survive a crash


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a comparison, as in `project.demo.stage.Options`."""

    invoices: Sequence[Invoice]
    port: int = 8000
    seed: int = 1


class Stage:
    """Plays the day in each way, on a running RabbitMQ and database."""

    def __init__(self, options: Options, server: RabbitMQ, url: str, folder: Path, screen: Screen, interrupt: Interrupt) -> None:
        self.options = options
        self.server = server
        self.url = url
        self.folder = folder
        self.screen = screen
        self.interrupt = interrupt

    def play(self) -> report.Days:
        """Play the day in one way after the other."""
        with self._processes(OUTBOX) as processes:
            processes.run("migrate", [*MANAGE, "migrate", "--verbosity", "0"])
        self.screen.say("RabbitMQ and the database are ready")
        days = {}
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(report.WATCH)
            for way in WAYS:
                self.screen.say(f"{way.title}: {way.words}")
                connection.execute(report.CLEAR)
                days[way.name] = self._play(way, connection)
        return days

    def _play(self, way: Way, connection: Connection) -> report.Day:
        """Start all processes of a way, play the day, stop them, and count."""
        permits = Permits(self.folder / way.name)
        permits.folder.mkdir()
        rounds = [[kill for kill in kills if kill != RELAY or way is OUTBOX] for kills in ROUNDS]
        with listen(self.options.port) as listener, self._processes(way) as processes:
            self._start(way, processes, permits, listener)
            feed = Feed(_address(listener), self.options.invoices, self.options.seed)
            course = Course(processes, permits, feed, lambda: self._count_open(way, connection), self.screen, settle_seconds=60)
            course.play(rounds, cause_outage=self._cause_outage)
        kills = len(list(permits.done()))
        return report.read(connection, failed_requests=course.failed_requests, planned=sum(map(len, rounds)), kills=kills)

    def _start(self, way: Way, processes: Processes, permits: Permits, listener: socket.socket) -> None:
        """Start all processes, and wait until the shop answers."""
        command = [sys.executable, "-m", "gunicorn", "project.wsgi", "--bind", f"fd://{listener.fileno()}"]
        command += ["--threads", "4", "--log-level", "warning", "--no-control-socket"]
        command += ["--preload"]  # so that the worker that replaces a killed one starts at once
        processes.start(WEB, command, environment(WEB, permits), inherits=[listener.fileno()])
        for name, own_command in way.processes.items():
            processes.start(name, own_command, environment(name, permits))
        wait_for_shop(_address(listener), processes)

    def _cause_outage(self, meanwhile: Callable[[], None]) -> None:
        """Kill RabbitMQ and start it again while a function runs."""
        queues = self.server.control("-q", "list_queues", "--no-table-headers", "name", "type")
        deadline = time.monotonic() + SAFE_SECONDS
        for name, kind in (line.split() for line in queues.splitlines()):
            while kind == "quorum" and not self.server.knows_after_crash(name) and time.monotonic() < deadline:
                time.sleep(0.1)
        self.server.kill()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(meanwhile)
            self.server.start()
            sending.result()

    def _count_open(self, way: Way, connection: Connection) -> int:
        """Return the number of messages that wait in the outbox, and of ready and unacknowledged ones in RabbitMQ's queues."""
        unfinished = number(connection, UNFINISHED)
        if way is OUTBOX:  # between the counts, a handler's message may move from the outbox to a queue, and be missed
            unfinished += number(connection, report.LOST)
        queues = self.server.control("-q", "list_queues", "--no-table-headers", "messages")
        return unfinished + sum(map(int, queues.split()))

    def _processes(self, way: Way) -> Processes:
        environment_ = {
            "DATABASE_URL": self.url,
            "DJANGO_SETTINGS_MODULE": SETTINGS,
            "DEBUG": "0",
            "SECRET_KEY": secrets.token_urlsafe(32),
            "SHOP_VAR_DIR": str(self.folder),
            "TMPDIR": str(self.folder),  # so the files of a killed process are deleted with the folder
            "PYTHONUNBUFFERED": "1",
            "DEMO_WAY": way.name,
            "DEMO_RABBITMQ": self.server.address,
        }
        return Processes(self.folder, environment_, self.interrupt.check)


def play(options: Options, screen: Screen, interrupt: Interrupt) -> report.Days:
    """Play all days on a RabbitMQ and a database that are started for this. After an error, the folder with the logs is kept."""
    folder = Path(tempfile.mkdtemp(prefix="outbox-demo-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            with RabbitMQ(folder / "rabbitmq") as server, own_database() as url:
                return Stage(options, server, url, folder, screen, interrupt).play()
        except ServerError as error:
            raise DemoError(str(error)) from error
        except Exception:
            stack.pop_all()
            screen.say(f"logs are in {folder}")
            raise


def _address(listener: socket.socket) -> str:
    return "http://{}:{}".format(*listener.getsockname())

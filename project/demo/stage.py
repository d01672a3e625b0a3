"""Set up the demo: the database; web server, Celery, relay and consumers as processes; and the scenario."""

from __future__ import annotations

import base64
import secrets
import shutil
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from project.demo import report
from project.demo.brokers import DemoBroker, Embedded
from project.demo.database import own_database
from project.demo.feed import Feed
from project.demo.interrupt import Interrupt
from project.demo.kills import CELERY, LONG_RUNNING, Permits
from project.demo.outage import Outage
from project.demo.processes import DemoError, Processes
from project.demo.scenario import Scenario
from project.demo.screen import Screen
from project.shop.orders_file import Invoice

GROUPS = ("cart", "points", "shipment", "letters")
MANAGE = [sys.executable, "manage.py"]
START_SECONDS = 120
PORTS = 50  # ports that are tried


@dataclass(frozen=True, slots=True)
class Options:
    """
    The options of a demo.

    Args:
        port: the web server's port, or the next free one.
        celery_broker: the URL of Redis or RabbitMQ; "" for files.
        seed: chooses the orders whose payment is declined.
    """

    invoices: Sequence[Invoice]
    port: int = 8000
    celery_broker: str = ""
    seed: int = 1
    with_kills: bool = True
    broker: DemoBroker = field(default_factory=Embedded)


class Stage:
    """
    The running demo, which `open_stage` creates.

    Args:
        listener: a socket that listens at the web server's address before the web server starts, so that the port stays reserved.
    """

    def __init__(
        self, options: Options, url: str, folder: Path, listener: socket.socket, screen: Screen, interrupt: Interrupt
    ) -> None:
        self.options = options
        self.database_url = url
        self.folder = folder
        self.screen = screen
        self.listener = listener
        self.address = "http://{}:{}".format(*listener.getsockname())
        self.permits = Permits(folder)
        self.processes = Processes(folder, self._environment(), interrupt.check)
        self.outage: Outage | None = None  # of the broker, after it was killed

    def start(self) -> None:
        """Migrate, start all processes, and wait until the shop answers."""
        self.processes.run("migrate", [*MANAGE, "migrate", "--verbosity", "0"])
        self.screen.say("the database is ready")
        # With DEBUG, it also serves the admin's stylesheets.
        self.processes.start("web", self._web_server(), {"DEBUG": "1"}, inherits=[self.listener.fileno()])
        self.processes.start(CELERY, self._celery(), self.permits.environment(CELERY))
        self.processes.start(LONG_RUNNING, [*MANAGE, "outbox_relay"], self.permits.environment(LONG_RUNNING))
        for group in GROUPS:
            command = [*MANAGE, "outbox_consume", "--group", group]
            self.processes.start(group, command, self.permits.environment(group))
        for name, command_name in self.options.broker.commands.items():
            self.processes.start(name, [*MANAGE, command_name])
        wait_for_shop(self.address, self.processes)
        self.screen.say(f"web server, Celery with beat, relay and {len(GROUPS)} consumers run")

    def play(self) -> None:
        """Send the orders with kills in between, and wait until all work is done."""
        feed = Feed(self.address, self.options.invoices, self.options.seed)
        broker = self.options.broker
        with psycopg.connect(self.database_url, autocommit=True) as connection:

            def count_open() -> int:
                return broker.count_open(connection, report.Kills.count(self.permits.done()))

            kill = broker.plan_kill(connection)
            scenario = Scenario(self.processes, self.permits, feed, count_open, self.screen, broker.settle_seconds)
            scenario.play(broker.rounds if self.options.with_kills else (), kill)
            self.outage = kill.outage if kill else None

    def stop(self) -> None:
        """Stop all processes except the database."""
        for name in self.processes.stop():
            self.screen.say(f"{name} did not stop in time, and was killed")
        self.screen.say("all processes have ended")

    def read_report(self) -> report.Report:
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            self.options.broker.show(connection)
            kills = report.Kills.count(self.permits.done())
            broker = self.options.broker
            return report.read(connection, kills, broker.doors, self.outage, publishes_once=broker.publishes_once)

    def add_admin(self, name: str) -> str:
        """Create a superuser; return its password."""
        password = secrets.token_urlsafe(9)
        command = [*MANAGE, "createsuperuser", "--noinput", "--username", name, "--email", "admin@shop.example"]
        self.processes.run("createsuperuser", command, {"DJANGO_SUPERUSER_PASSWORD": password})
        return password

    def stay(self) -> None:
        """Keep everything running until Interrupted is raised."""
        while True:
            self.processes.tend()
            time.sleep(0.5)

    def _environment(self) -> dict[str, str]:
        environment = {
            "DATABASE_URL": self.database_url,
            "DJANGO_SETTINGS_MODULE": "project.demo.settings",
            "DEBUG": "0",
            "SECRET_KEY": secrets.token_urlsafe(32),
            "SHOP_VAR_DIR": str(self.folder),
            "TMPDIR": str(self.folder),  # so the files of a killed process are deleted with the folder
            "DEMO_CHECK_BACK_URL": f"{self.address}/outbox/check-back/",
            "DEMO_SECRET": f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}",
            "PYTHONUNBUFFERED": "1",
            **self.options.broker.environment(),
        }
        if self.options.celery_broker:
            environment["CELERY_BROKER_URL"] = self.options.celery_broker
        return environment

    def _web_server(self) -> list[str]:
        command = [sys.executable, "-m", "gunicorn", "project.wsgi", "--bind", f"fd://{self.listener.fileno()}"]
        return [*command, "--threads", "4", "--log-level", "warning", "--no-control-socket"]

    def _celery(self) -> list[str]:
        command = [sys.executable, "-m", "celery", "-A", "project", "worker", "--queues", "outbox,shop"]
        command += ["--concurrency", "2", "--loglevel", "WARNING", "--beat", "--schedule", str(self.folder / "beat")]
        return [*command, "--without-gossip", "--without-mingle", "--without-heartbeat"]


@contextmanager
def open_stage(options: Options, screen: Screen, interrupt: Interrupt) -> Iterator[Stage]:
    """Run the demo for the time of the block. After an error, its folder with the logs is kept."""
    folder = Path(tempfile.mkdtemp(prefix="outbox-demo-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            if options.broker.opening:
                screen.say(options.broker.opening)
            with own_database() as url, options.broker.run(folder), listen(options.port) as listener:
                stage = Stage(options, url, folder, listener, screen, interrupt)
                with stage.processes:
                    stage.start()
                    yield stage
        except Exception:
            stack.pop_all()
            screen.say(f"logs are in {folder}")
            raise


def listen(first: int) -> socket.socket:
    """
    Listen at the first free port from `first` on.

    Raises:
        DemoError: none of the next `PORTS` ports is free.
    """
    for port in range(first, first + PORTS):
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
    raise DemoError(f"No port from {first} to {first + PORTS - 1} is free. Name another: --port N.")


def wait_for_shop(address: str, processes: Processes) -> None:
    """
    Wait until the shop answers at an address.

    Raises:
        DemoError: it did not answer in time, or a process ended.
    """
    deadline = time.monotonic() + START_SECONDS
    while not _answers(address):
        processes.tend()
        if time.monotonic() > deadline:
            raise DemoError(f"The shop did not answer at {address} within {START_SECONDS} s.")
        time.sleep(0.05)


def _answers(address: str) -> bool:
    """Return whether the shop answers at an address."""
    try:
        urllib.request.urlopen(f"{address}/shop/orders/", timeout=5)  # noqa: S310
    except urllib.error.HTTPError:
        return True  # the shop answers: the view accepts only POST
    except OSError:
        return False
    return True

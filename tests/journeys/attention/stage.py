"""A database with the outbox, its processes and servers: the stage of one situation."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import psycopg
from django.conf import settings as django_settings
from psycopg import sql

from outbox.testing.postgres import Postgres
from project.servers.rabbitmq import RabbitMQ
from project.servers.redis import Redis
from tests.journeys.attention.given import VARIABLE
from tests.journeys.shutdown.scene import Server
from tests.waiting import wait_until

ROLE = "app"  # owns the tables, and is no superuser
DATABASE = "shop"

UNREACHABLE = "unreachable"  # the sample of a database that cannot be asked

APP = "tests.journeys.attention.app"
COMMANDS = {
    "relay": ["django", "outbox_relay"],
    "consumer": ["django", "outbox_consume"],
    "checker": ["django", "outbox_checker"],
    "worker": ["celery", "-A", APP, "worker", "--pool", "solo", "-Q", "outbox", "-l", "WARNING"],
    "beat": ["celery", "-A", APP, "beat", "-l", "WARNING"],
}


class Servers:
    """Servers that situations share: a PostgreSQL and a RabbitMQ; and copies of the PostgreSQL for those that hurt it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._lock = threading.RLock()
        self._numbers = iter(range(1, 1000))
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="situations-")))
        self.folder.chmod(0o755)  # another user runs PostgreSQL
        with Postgres(self.folder / "template") as server:
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute(f"CREATE ROLE {ROLE} LOGIN")
                connection.execute(f"CREATE DATABASE {DATABASE} OWNER {ROLE}")
            environment = make_environment(server.url_of(DATABASE), {})
            command = [sys.executable, "-m", "django", "migrate", "--verbosity", "0"]
            subprocess.run(command, cwd=django_settings.BASE_DIR, env=environment, check=True)
        self.postgres = Postgres(self.copy_of_postgres(), max_connections=500)
        self._stack.enter_context(self.postgres)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def folder_of_its_own(self) -> Path:
        folder = self.folder / str(next(self._numbers))
        folder.mkdir()
        folder.chmod(0o755)
        return folder

    def copy_of_postgres(self, home: Path | None = None) -> Path:
        """Return the home of another PostgreSQL with the outbox's tables in it."""
        home = home or self.folder_of_its_own() / "postgres"
        subprocess.run(["cp", "-a", self.folder / "template", home], check=True)
        return home

    def database(self) -> str:
        """Make a database on the common server; return its URL."""
        with self._lock, psycopg.connect(self.postgres.url, autocommit=True) as connection:
            name = f"{DATABASE}_{next(self._numbers)}"
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {DATABASE} OWNER {ROLE}")
        return self.postgres.url_of(name)

    @cached_property
    def _rabbitmq(self) -> RabbitMQ:
        return self._stack.enter_context(RabbitMQ(self.folder_of_its_own()))

    def virtual_host(self) -> tuple[RabbitMQ, str]:
        """Return the common RabbitMQ, and a virtual host and user of that name there, which nobody else uses."""
        with self._lock:
            name = f"shop-{next(self._numbers)}"
            node = self._rabbitmq
        node.control("add_vhost", name)
        node.control("add_user", name, name)
        for user in (name, "guest"):
            node.control("set_permissions", "-p", name, user, ".*", ".*", ".*")
        return node, name


@dataclass(frozen=True)
class Sample:
    """The status at one time: entries, each with cause, step and error; None if the database could not be asked."""

    at: float
    entries: Mapping[str, list[str]] | None
    handled: float

    def has(self, entry: str) -> bool:
        return entry == UNREACHABLE if self.entries is None else bool(self.told(entry))

    def told(self, entry: str) -> list[str]:
        """Return cause, step and error of an entry; the subject may have a number that is not known before."""
        return next((rest for name, rest in (self.entries or {}).items() if f"{name} ".startswith(f"{entry} ")), [])

    @property
    def names(self) -> list[str]:
        return [UNREACHABLE] if self.entries is None else list(self.entries)


class Stage:
    """
    The stage of one situation: leave the block to end its processes and servers.

    Args:
        needs: servers of its own: "postgres", "rabbitmq" and "redis"; "virtual host" on the common RabbitMQ.
        given: what its processes are told, see given.py.
        starts: its processes.
        web: more environment variables of the web server.
    """

    def __init__(
        self,
        servers: Servers,
        needs: tuple[str, ...],
        given: Mapping[str, Any],
        starts: tuple[str, ...],
        web: Mapping[str, str] | None = None,
    ) -> None:
        self.samples: list[Sample] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.folder = servers.folder_of_its_own()
        self.given = dict(given)
        self._stack = ExitStack()
        self._servers = servers
        self._needs = needs
        self._starts = starts
        self._variables = web or {}

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        if "postgres" in self._needs:
            home = None
            if "small disk" in self._needs:
                self.disk = self.folder / "disk"
                self.disk.mkdir()
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m,mode=755", "none", self.disk], check=True)
                self._stack.callback(subprocess.run, ["umount", "-l", self.disk], check=True)
                home = self.disk / "postgres"
            self.postgres = Server(self._servers.copy_of_postgres(home))
            self._stack.callback(self.postgres.stop)
            self.url = self.postgres.url.replace("/postgres?", f"/{DATABASE}?")
        else:
            self.url = self._servers.database()
        if "rabbitmq" in self._needs:
            self.rabbitmq = self._stack.enter_context(RabbitMQ(self.folder / "rabbitmq"))
            self.given |= {"broker": "rabbitmq", "nodes": [self.rabbitmq.address]}
        if "virtual host" in self._needs:
            self.rabbitmq, name = self._servers.virtual_host()
            self.given |= {"broker": "rabbitmq", "nodes": [self.rabbitmq.address]}
            self.given |= {"virtual_host": name, "user": name, "password": name}
        if "redis" in self._needs:
            self.redis = self._stack.enter_context(Redis(self.folder / "redis"))
            self.given["celery"] = self.redis.url
        for name in self._starts:
            self.start(name)
        self.start("web", **self._variables)

    def start(self, name: str, as_: str = "", *, given: Mapping[str, Any] | None = None, **variables: str) -> None:
        """
        Start a process.

        Args:
            as_: the name to give it here, if there is one of that name.
            given: what it is told and others are not.
        """
        if variables.get("LD_PRELOAD") == "":
            raise FileNotFoundError("There is no libfaketime: apt-get install faketime.")
        command = COMMANDS.get(name, [f"tests.journeys.attention.{name}"])
        is_web = name == "web"
        with (self.folder / f"{as_ or name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=django_settings.BASE_DIR,
                env=make_environment(self.url, {**self.given, **(given or {})}) | {"SHOP_VAR_DIR": str(self.folder), **variables},
                stdin=subprocess.PIPE if is_web else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_web else log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[as_ or name] = process
        if is_web:
            threading.Thread(target=self._read, args=[process], daemon=True).start()

    def _read(self, web: subprocess.Popen[bytes]) -> None:
        assert web.stdout is not None
        for line in web.stdout:
            said = json.loads(line)
            entries = None if said is None else {name: rest for name, *rest in said["entries"]}
            self.samples.append(Sample(time.monotonic(), entries, said["handled"] if said else 0.0))

    def another_virtual_host(self) -> str:
        """Return the name of a virtual host, user and password on the same RabbitMQ."""
        return self._servers.virtual_host()[1]

    def publish(self, do: str, count: int = 1, topic: str = "orders") -> None:
        """Publish messages by the web server."""
        web = self.processes["web"]
        assert web.stdin is not None
        web.stdin.write(f"{json.dumps([topic, {'do': do}, count])}\n".encode())
        web.stdin.flush()

    def send(self, name: str, number: int) -> None:
        """Send a signal to a process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, number)

    def kill(self, *names: str) -> None:
        for name in names:
            self.send(name, signal.SIGKILL)
            self.processes[name].wait()

    def freeze(self, name: str) -> None:
        self.send(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.send(name, signal.SIGCONT)

    def stop(self, *names: str) -> None:
        """End processes as an operator does."""
        for name in names:
            self.processes[name].terminate()
        for name in names:
            self.processes[name].wait(30)

    def execute(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Execute a statement as superuser; return its rows."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            found = connection.execute(sql.SQL(statement), arguments or None)  # type: ignore[arg-type]
            return found.fetchall() if found.description else []

    def run(self, *command: str) -> None:
        """Run a command of Django's to its end."""
        environment = make_environment(self.url, self.given)
        arguments = [sys.executable, "-m", "django", *command]
        subprocess.run(arguments, cwd=django_settings.BASE_DIR, env=environment, check=True, capture_output=True)

    def wait_for(self, condition: Callable[[Sample], object], seconds: float) -> Sample:
        """Return the first sample from now on that fulfils a condition."""
        began = time.monotonic()

        def find() -> Sample | None:
            return next((one for one in self.samples[::-1] if one.at >= began and condition(one)), None)

        return wait_until(find, seconds)  # type: ignore[return-value]

    def logs(self) -> str:
        """Return the end of what each process logged, for a situation that was not as expected."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for name, process in self.processes.items():
            self.send(name, signal.SIGKILL)
            process.wait()
        self._stack.close()


def make_environment(url: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a process on a database."""
    return {
        **os.environ,
        "DATABASE_URL": url.replace("//postgres@", f"//{ROLE}@"),
        "DJANGO_SETTINGS_MODULE": "tests.journeys.attention.settings",
        VARIABLE: json.dumps(given),
    }

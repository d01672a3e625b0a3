"""A PostgreSQL that can be killed and frozen, and processes of the outbox on it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psycopg
from django.conf import settings as django_settings

from outbox.models import State
from outbox.testing.postgres import Postgres
from tests.journeys.shutdown import VARIABLE
from tests.waiting import wait_until

SENT = f"SELECT coalesce(sum(cardinality(message_ids) - cardinality(split)), 0) FROM outbox_batch WHERE state = {State.SENT}"

HANDLED = "SELECT count(*) FROM outbox_inbox WHERE message_id IN (SELECT id FROM outbox_message)"

LIMIT = 12.0  # seconds: a well machine takes 1 to 5; who waits for what is frozen, or backs off, takes 30


class Server:
    """The PostgreSQL."""

    def __init__(self, home: Path) -> None:
        self._server = Postgres(home)
        self._frozen: list[int] = []
        self._server.start()
        self.url = self._server.url

    def kill(self) -> None:
        """End it as a machine that loses its power would."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._server.stop()

    def start(self) -> None:
        self._server.start()

    def freeze(self) -> None:
        """Freeze it. Connections stay, and new ones wait."""
        self._frozen = self._pids()
        for pid in self._frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen = []

    def stop(self) -> None:
        self.thaw()
        self._server.stop()

    def _pids(self) -> list[int]:
        postmaster = int((self._server.home / "data/postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        return [postmaster, *map(int, children)]


class Scene:
    """
    Processes on a server.

    Args:
        options: of a RocketMQ broker; empty: messages go to the embedded one.
    """

    def __init__(self, server: Server, folder: Path, options: dict[str, object]) -> None:
        self.server = server
        self.folder = folder
        self.options = options
        self.processes: list[subprocess.Popen[str]] = []
        self.publisher = self.start("tests.journeys.shutdown.publisher", stdin=subprocess.PIPE)

    def start(self, *command: str, stdin: int | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start `python -m ...`, its errors in a file of their own."""
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=django_settings.BASE_DIR,
            env={
                **os.environ,
                "DATABASE_URL": self.server.url,
                "DJANGO_SETTINGS_MODULE": "tests.journeys.shutdown.settings",
                VARIABLE: json.dumps(self.options),
                **environment,
            },
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self._log(len(self.processes)).open("w"),
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def said(self, process: subprocess.Popen[str]) -> str:
        """Return what a process has logged."""
        return self._log(self.processes.index(process)).read_text()

    def publish(self, count: int = 1, **body: object) -> None:
        """Publish messages; wait until the last one is committed."""
        self.order(count, **body)
        assert self.publisher.stdout is not None
        assert self.publisher.stdout.readline() == f"{count}\n", self.said(self.publisher)

    def order(self, count: int = 1, **body: object) -> None:
        """Publish messages as soon as that is possible."""
        assert self.publisher.stdin is not None
        self.publisher.stdin.write(f"{json.dumps([count, body])}\n")
        self.publisher.stdin.flush()

    def sent(self) -> int:
        """Count the messages that are sent."""
        return int(self._ask(SENT))

    def handled(self) -> int:
        """Count the messages of this scene that the consumers have handled: a broker may have others' still."""
        return int(self._ask(HANDLED))

    def backends(self, name: str) -> int:
        """Count the connections of that name."""
        return int(self._ask("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", name))

    def listens(self, kind: str) -> bool:
        """Return whether a process of that kind says that it lives."""
        return bool(self._ask("SELECT count(*) FROM outbox_process WHERE kind = %s", kind))

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def logs(self) -> str:
        """Return the end of what each process logged, for a test that failed."""
        return "\n".join(f"--- {process.args}\n{self.said(process)[-2000:]}" for process in self.processes)

    def _ask(self, statement: str, *arguments: object) -> object:
        with psycopg.connect(self.server.url) as connection:
            found = connection.execute(statement, arguments or None).fetchone()
        assert found is not None
        return found[0]

    def _log(self, nth: int) -> Path:
        return self.folder / f"{nth}.log"


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> float:
    """Ask a process to end; return the seconds until it did."""
    began = time.monotonic()
    process.send_signal(number)
    process.wait(30)
    return time.monotonic() - began


def wait(seconds: float, *processes: subprocess.Popen[str]) -> None:
    """Wait while processes run, which must outlast it."""
    ends_at = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= ends_at or any(process.poll() is not None for process in processes), seconds + 5)
    assert [process.poll() for process in processes] == [None] * len(processes)


def seconds_until(conditions: Iterable[object]) -> float:
    """Return the seconds until one of the conditions, looked at one after the other, is true."""
    began = time.monotonic()
    looks = iter(conditions)
    wait_until(lambda: next(looks), 120)
    return time.monotonic() - began

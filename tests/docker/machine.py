"""Runs the services of docker/compose.yaml as processes: their commands, environment and healthchecks, other addresses."""

import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psycopg

from tests.docker import compose, dockerfile
from tests.docker.compose import ROOT
from tests.waiting import wait_until

LETTERS = "SELECT count(*) FROM shop_letter WHERE invoice = %s"

START_SECONDS = 120  # of a busy machine
END_SECONDS = 40  # as stop_grace_period


class Machine:
    """
    Where the services run.

    Args:
        folder: what is /tmp in a container.
        places: text of the compose file or Dockerfile -> text here, such as addresses.
    """

    def __init__(self, folder: Path, places: Mapping[str, str], **variables: str) -> None:
        self.folder = folder
        self.port = _free_port()
        self.services = compose.read(**variables)["services"]
        self._places = {
            **places,
            "/tmp": str(folder),  # noqa: S108
            "/app/static": str(folder / "static"),
            "0.0.0.0:8000": f"127.0.0.1:{self.port}",
            "web:8000": f"127.0.0.1:{self.port}",
            "http://127.0.0.1:8000": f"http://127.0.0.1:{self.port}",
        }

    def run(self, service: str) -> str:
        """Run a service that ends; give what it said."""
        command = self.services[service]["command"]
        return self._run(service, command, check=True).stdout

    @contextmanager
    def running(self, *services: str) -> Iterator[None]:
        """Start services that stay, unhealthy before, wait until all are healthy, and end them by SIGTERM, with exit code 0."""
        assert [service for service in services if self.is_healthy(service)] == []
        with ExitStack() as stack:
            processes = {service: stack.enter_context(self._process(service)) for service in services}
            for service, process in processes.items():
                self._wait_until_healthy(service, process)
            yield
        codes = {service: process.returncode for service, process in processes.items()}
        assert codes == dict.fromkeys(services, 0), [self.log(service) for service in services]

    def is_healthy(self, service: str) -> bool:
        """Ask a service how it is, as Docker would."""
        kind, *words = self.services[service].get("healthcheck", {}).get("test") or ["CMD", *dockerfile.healthcheck()]
        command = ["sh", "-c", words[0]] if kind == "CMD-SHELL" else words
        return self._run(service, command).returncode == 0

    def get(self, path: str) -> str:
        """Fetch a page of the shop."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()  # type: ignore[no-any-return]

    def post(self, path: str, body: str) -> int:
        """Post JSON to the shop; return the status."""
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers), timeout=60) as answer:
            return answer.status  # type: ignore[no-any-return]

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text(errors="replace")

    @contextmanager
    def _process(self, service: str) -> Iterator[subprocess.Popen[bytes]]:
        command = self._here(self.services[service].get("command") or dockerfile.command())
        with (self.folder / f"{service}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=self._environment(service), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            finally:
                process.kill()
                process.wait()

    def _wait_until_healthy(self, service: str, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.is_healthy(service):
            assert process.poll() is None, self.log(service)
            assert time.monotonic() < deadline, f"{service} is not healthy: {self.log(service)}"
            time.sleep(1)

    def _run(self, service: str, command: Sequence[str], *, check: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self._here(command), cwd=ROOT, env=self._environment(service), capture_output=True, text=True, timeout=120
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def _environment(self, service: str) -> dict[str, str]:
        asked = {**dockerfile.environment(), **self.services[service]["environment"]}
        return {name: self._place(value) for name, value in asked.items()} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOSTNAME": socket.gethostname(),
            "HOME": str(self.folder),
        }

    def _here(self, command: Sequence[str]) -> list[str]:
        return [self._place(word) for word in command]

    def _place(self, text: str) -> str:
        """Put all places into a text in one go, so that none of what was put in is replaced again."""
        there = sorted(self._places, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, there)), lambda match: self._places[match[0]], text)


def wait_for_letter(books: psycopg.Connection, invoice: str, seconds: float = 60) -> None:
    """Wait until the last of all consumers has done its part for an order."""
    wait_until(lambda: books.execute(LETTERS, [invoice]).fetchone() == (1,), seconds)


def _free_port() -> int:
    """Find a port that nobody uses, below those that systems give to outgoing connections."""
    while True:
        port = random.randrange(10_000, 20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

"""The processes of one package, the publisher and its relay, and the CPU time of relay and server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.db import connection

from benchmarks.cpu import TICKS_PER_SECOND
from benchmarks.peers import sink
from benchmarks.processes import ROOT

PYTHON = ROOT / ".peers" / "bin" / "python"


class PeerError(Exception):
    """A package's process failed; the text is its last output."""


class Peer:
    """A package with a database of its own, and a process that publishes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.version = "-"
        self.sink = folder / f"{name}.sink"
        self.sink.touch()
        self._errors = (folder / f"{name}.log").open("w+b")
        database = f"peers_{name}"
        with connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {database}")
            cursor.execute(f"CREATE DATABASE {database}")
        settings = {key: connection.settings_dict[key] for key in ("ENGINE", "HOST", "PORT", "USER", "PASSWORD", "OPTIONS")}
        self._environment = {
            **{key: value for key, value in os.environ.items() if key not in ("DATABASE_URL", sink.FILE)},
            "DJANGO_SETTINGS_MODULE": "benchmarks.peers.settings",
            "PYTHONPATH": str(ROOT),
            "PEERS_PACKAGE": name,
            "PEERS_DATABASE": json.dumps({**settings, "NAME": database}),
        }
        self._side = self._start(["-m", "benchmarks.peers.side"], {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def open(self) -> None:
        """
        Wait until the process can publish.

        Raises:
            PeerError: it ended instead.
        """
        self.version, self._relay_command = self._answer()

    def ask(self, *words: object) -> Any:
        """Send a command to the publishing process; return its answer."""
        assert self._side.stdin
        with suppress(BrokenPipeError):  # it has ended, and answers nothing
            self._side.stdin.write(" ".join(map(str, words)).encode() + b"\n")
            self._side.stdin.flush()
        return self._answer()

    @contextmanager
    def relay(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the package's relay, which sends to the sink."""
        process = self._start(["-m", "django", *self._relay_command], {sink.FILE: str(self.sink)}, stdout=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:  # it takes no signals
                process.kill()
                process.wait()

    def taken(self) -> int:
        """Return how many messages the relay has sent."""
        return self.sink.read_bytes().count(b"\n")

    def times(self) -> dict[str, float]:
        """Return when each order's message was sent, by the order's number as text."""
        return {number: float(moment) for number, moment in map(str.split, self.sink.read_text().splitlines())}

    def close(self) -> None:
        assert self._side.stdin
        with suppress(BrokenPipeError):
            self._side.stdin.close()
        self._side.wait(30)
        self._errors.close()

    def explain(self) -> str:
        """Return the last output of the package's processes."""
        self._errors.seek(0)
        return (self._errors.read().decode().strip().splitlines() or ["it ended without a word"])[-1]

    def _start(self, arguments: list[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [PYTHON, *arguments], cwd=ROOT, env={**self._environment, **environment}, stderr=self._errors, **options
        )

    def _answer(self) -> Any:
        assert self._side.stdout
        line = self._side.stdout.readline()
        if not line:
            self._side.wait(30)
            raise PeerError(self.explain())
        return json.loads(line)


def cpu_seconds(relay: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds that a relay with its children, and the whole server, have used. Linux, server on this machine."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        backend = cursor.fetchone()[0]
    server = _stat(backend)[1]
    alive = [stat for stat in map(_stat, _pids()) if stat and stat[1] == server]
    ours = _stat(relay.pid)
    return (sum(stat[11] + stat[12] for stat in alive) + sum(_stat(server)[11:15]) + sum(ours[11:15])) / TICKS_PER_SECOND


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[int]:
    """Return the numbers of /proc/PID/stat after the state ([1] is the parent), or nothing for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [0, *map(int, fields[1:])]

"""A real Redis on a port of its own, as long as the one who started it lives."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from project.servers.rocketmq_jars import ServerError

HOST = "127.0.0.1"
START_SECONDS = 10
STOP_SECONDS = 15


def has_redis() -> bool:
    """Return whether there is a server to start."""
    return shutil.which("redis-server") is not None


class Redis:
    """
    One server; leave the block to stop it.

    Args:
        home: its folder; it writes down every change, so that it knows it after a restart.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://{HOST}:{self.port}/0"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Self:
        """Start it and wait until it answers. Raises ServerError."""
        if not has_redis():
            raise ServerError("There is no redis-server here. Install it: apt-get install redis-server.")
        tie = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []  # a killed parent leaves none behind
        command = [*tie, "redis-server", "--port", str(self.port), "--bind", HOST, "--dir", str(self._home)]
        with (self._home / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--save", "", "--appendonly", "yes", "--maxmemory-policy", "noeviction"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self._home / "redis.log").read_text()
                self.stop()
                raise ServerError(f"Redis did not start. It said:\n{said}")
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """End it, in an orderly way if it can."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False


def free_port() -> int:
    """Find a port that nobody uses now, below those that systems give to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)  # noqa: S311
        with socket.socket() as listener, suppress(OSError):
            listener.bind((HOST, port))
            return port

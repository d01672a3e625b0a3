"""A server that is one program, on its own port, which ends with the process that started it."""

from __future__ import annotations

import abc
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from project.servers.rocketmq_jars import ServerError

HOST = "127.0.0.1"
STOP_SECONDS = 15


class Program(abc.ABC):
    """One server; leave the block to stop it."""

    command: ClassVar[str]
    package: ClassVar[str]  # that has it, in Debian
    last_signal: ClassVar[str] = "TERM"  # when its parent was killed
    start_seconds: ClassVar[float] = 10

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def is_here(cls) -> bool:
        """Return whether there is a program to start."""
        return shutil.which(cls.command) is not None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Self:
        """Start it and wait until it answers. Raises ServerError."""
        if not self.is_here():
            raise ServerError(f"There is no {self.command} here. Install it: apt-get install {self.package}.")
        home = self._make_home()
        tie = ["setpriv", "--pdeathsig", self.last_signal] if shutil.which("setpriv") else []
        command = [*self._as_owner(tie), self.command, *self._arguments(home)]
        log = home / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=self._environment(home),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + self.start_seconds
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text()
                self.stop()
                raise ServerError(f"{self.command} did not start. It said:\n{said}")
            time.sleep(0.02)
        return self

    def wait(self) -> None:
        """Wait until it ends without being stopped here."""
        if self._process is not None:
            self._process.wait()

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

    def kill(self) -> None:
        """End it as SIGKILL does. `start` starts it again, with what it had written down."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def freeze(self) -> None:
        """Suspend it until `thaw`; its connections stay open."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGCONT)

    @abc.abstractmethod
    def _make_home(self) -> Path:
        """Return the folder where it works and where its log goes."""

    @abc.abstractmethod
    def _arguments(self, home: Path) -> Sequence[str | Path]:
        """Return the arguments of the program."""

    @abc.abstractmethod
    def _answers(self) -> bool: ...

    def _environment(self, home: Path) -> Mapping[str, str] | None:
        """Return what stands in its environment; None: what stands in this process's."""
        return None

    def _as_owner(self, tie: list[str]) -> list[str]:
        """Return the prefix of the command; `tie` ends it with its parent."""
        return tie


_given: set[int] = set()  # by `free_port`: they may be used only seconds later


def free_port() -> int:
    """Find a free port below the ephemeral range that this process was not given before."""
    while True:
        port = random.randrange(20_000, 32_000)  # noqa: S311
        with socket.socket() as listener, suppress(OSError):
            listener.bind((HOST, port))
            if port not in _given:
                _given.add(port)
                return port

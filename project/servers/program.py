"""
Programs that are servers, each on a free port: start, wait for an answer, stop. They end with the process that started them.
"""

from __future__ import annotations

import abc
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Generic, Self, TypeVar

HOST = "127.0.0.1"
STOP_SECONDS = 15


class ServerError(Exception):
    """Raised when a server cannot be set up or does not start; the text has the next step."""


def tie(last_signal: str) -> list[str]:
    """Return a prefix for a command, with which the command gets a signal when its parent ends, even if that is killed."""
    return ["setpriv", "--pdeathsig", last_signal] if shutil.which("setpriv") else []


class Child:
    """
    A running program.

    Args:
        log: the file for its output.
        environment: its environment variables; None for those of this process.
        folder: its working directory; None for that of this process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._name = name
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_for_answer(self, answers: Callable[[], bool], seconds: float) -> None:
        """
        Wait until the program answers.

        Raises:
            ServerError: it has ended, or did not answer in time.
        """
        deadline = time.monotonic() + seconds
        while not answers():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                problem = f"ended with exit code {code}" if code is not None else f"did not answer within {seconds:g} s"
                raise ServerError(f"{self._name} {problem}. Its output:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Wait until it ends."""
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and to its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def freeze(self) -> None:
        """Suspend the program and its children, and wait until all their threads have stopped, since SIGSTOP takes a moment."""
        self.send(signal.SIGSTOP)
        while self._states() - {"T", "Z"}:
            time.sleep(0.01)

    def _states(self) -> set[str]:
        """Return the states of the threads of its process group, by Linux' letters: T is stopped, Z is a zombie."""
        states = set()
        for stat in Path("/proc").glob("[0-9]*/task/*/stat"):
            with suppress(OSError):  # the thread has ended
                state, _, group = stat.read_text().rpartition(") ")[2].split()[:3]
                if group == str(self._process.pid):
                    states.add(state)
        return states

    def stop(self) -> None:
        """Stop the program with SIGTERM; kill it if it does not end in time."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the program and its children with SIGKILL."""
        self.send(signal.SIGKILL)
        self._process.wait()


class Program(abc.ABC):
    """One server, as a context manager."""

    command: ClassVar[str]
    package: ClassVar[str]  # Debian's package with the command
    last_signal: ClassVar[str] = "TERM"  # the signal that the server gets when its parent ends
    start_seconds: ClassVar[float] = 10

    def __init__(self) -> None:
        self.port = free_port()
        self._child: Child | None = None

    @classmethod
    def is_here(cls) -> bool:
        """Return whether the program is installed."""
        return shutil.which(cls.command) is not None

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._child is not None and self._child.is_running

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Self:
        """
        Start the server and wait until it answers.

        Raises:
            ServerError: it is not installed, has ended, or does not answer.
        """
        return self.begin().finish()

    def begin(self) -> Self:
        """
        Start the server, without waiting for an answer.

        Raises:
            ServerError: it is not installed.
        """
        if not self.is_here():
            raise ServerError(f"{self.command} is not installed. On Debian and Ubuntu: apt-get install {self.package}.")
        home = self._make_home()
        command = [*self._as_owner(tie(self.last_signal)), self.command, *self._arguments(home)]
        self._child = Child(self.command, command, home / "log", environment=self._environment(home))
        return self

    def finish(self) -> Self:
        """
        Wait until a server that was started with `begin` answers.

        Raises:
            ServerError: it has ended, or did not answer in time; then it is stopped.
        """
        assert self._child is not None
        try:
            self._child.wait_for_answer(self._answers, self.start_seconds)
        except ServerError:
            self.stop()
            raise
        return self

    def wait(self) -> None:
        """Wait until the server ends."""
        if self._child is not None:
            self._child.wait()

    def stop(self) -> None:
        """Stop the server with SIGTERM; kill it if it does not end in time."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def kill(self) -> None:
        """Kill the server with SIGKILL. `start` starts it again, on the same files."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def freeze(self) -> None:
        """Suspend the server until `thaw`; its connections stay open."""
        if self._child is not None:
            self._child.freeze()

    def thaw(self) -> None:
        """Resume the server after `freeze`."""
        if self._child is not None:
            self._child.send(signal.SIGCONT)

    @abc.abstractmethod
    def _make_home(self) -> Path:
        """Create the server's folder with its configuration, and return it; the log is written there, too."""

    @abc.abstractmethod
    def _arguments(self, home: Path) -> Sequence[str | Path]:
        """Return the arguments of the program."""

    @abc.abstractmethod
    def _answers(self) -> bool: ...

    def _environment(self, home: Path) -> Mapping[str, str] | None:
        """Return the server's environment variables; None for those of this process."""
        return None

    def _as_owner(self, prefix: list[str]) -> list[str]:
        """Return the prefix of the command, with an addition if another user has to run it. `prefix`: that of `tie`."""
        return prefix


_given: set[int] = set()  # ports that `free_port` has returned, since a server may take its port only seconds later


def free_port() -> int:
    """Return a free port below the ephemeral range that was not returned in this process before."""
    while True:
        port = random.randrange(20_000, 32_000)  # noqa: S311
        with socket.socket() as listener, suppress(OSError):
            listener.bind((HOST, port))
            if port not in _given:
                _given.add(port)
                return port


AnyProgram = TypeVar("AnyProgram", bound=Program)


class ProgramCluster(Generic[AnyProgram]):
    """The nodes of a cluster, all on this machine, as a context manager."""

    nodes: list[AnyProgram]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Self:
        """
        Start all nodes.

        Raises:
            ServerError: one did not start; then all are stopped.
        """
        try:
            for node in self.nodes:
                node.begin()
            for node in self.nodes:
                node.finish()
        except ServerError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill all nodes."""
        for node in self.nodes:
            node.kill()

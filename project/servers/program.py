"""
Programs that are servers, each on a port of its own: start, wait for an answer, stop. They end with the process that starts them.
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
    """Return the prefix of a command that gets a signal when its parent has ended, however it did."""
    return ["setpriv", "--pdeathsig", last_signal] if shutil.which("setpriv") else []


class Child:
    """
    A running program.

    Args:
        log: the file for its output.
        environment: None: that of this process.
        folder: where it runs. None: where this process does.
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
        """Wait until it answers. Raises ServerError."""
        deadline = time.monotonic() + seconds
        while not answers():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                what = f"ended with exit code {code}" if code is not None else f"does not answer after {seconds:g} s"
                raise ServerError(f"{self._name} {what}. It said:\n{self._log.read_text(errors='replace')[-2000:]}")
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
        """Suspend it and its children, and return when each of their threads is: SIGSTOP takes effect a moment later."""
        self.send(signal.SIGSTOP)
        while self._states() - {"T", "Z"}:
            time.sleep(0.01)

    def _states(self) -> set[str]:
        """Return the states of the threads of its process group, as Linux names them."""
        states = set()
        for stat in Path("/proc").glob("[0-9]*/task/*/stat"):
            with suppress(OSError):  # it has ended
                state, _, group = stat.read_text().rpartition(") ")[2].split()[:3]
                if group == str(self._process.pid):
                    states.add(state)
        return states

    def stop(self) -> None:
        """End it, in an orderly way if it can."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it as SIGKILL does."""
        self.send(signal.SIGKILL)
        self._process.wait()


class Program(abc.ABC):
    """One server; leave the block to stop it."""

    command: ClassVar[str]
    package: ClassVar[str]  # that has it, in Debian
    last_signal: ClassVar[str] = "TERM"  # when its parent was killed
    start_seconds: ClassVar[float] = 10

    def __init__(self) -> None:
        self.port = free_port()
        self._child: Child | None = None

    @classmethod
    def is_here(cls) -> bool:
        """Return whether there is a program to start."""
        return shutil.which(cls.command) is not None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.is_running

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Self:
        """Start it and wait until it answers. Raises ServerError."""
        return self.begin().finish()

    def begin(self) -> Self:
        """Start it, without waiting. Raises ServerError where it is not installed."""
        if not self.is_here():
            raise ServerError(f"There is no {self.command} here. Install it: apt-get install {self.package}.")
        home = self._make_home()
        command = [*self._as_owner(tie(self.last_signal)), self.command, *self._arguments(home)]
        self._child = Child(self.command, command, home / "log", environment=self._environment(home))
        return self

    def finish(self) -> Self:
        """Wait until a server that was begun answers. Raises ServerError."""
        assert self._child is not None
        try:
            self._child.wait_for_answer(self._answers, self.start_seconds)
        except ServerError:
            self.stop()
            raise
        return self

    def wait(self) -> None:
        """Wait until it ends without being stopped here."""
        if self._child is not None:
            self._child.wait()

    def stop(self) -> None:
        """End it, in an orderly way if it can."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def kill(self) -> None:
        """End it as SIGKILL does. `start` starts it again, with its files."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def freeze(self) -> None:
        """Suspend it until `thaw`; its connections stay open."""
        if self._child is not None:
            self._child.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        if self._child is not None:
            self._child.send(signal.SIGCONT)

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

    def _as_owner(self, prefix: list[str]) -> list[str]:
        """Return the prefix of the command, with the one that ends it with its parent."""
        return prefix


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


AnyProgram = TypeVar("AnyProgram", bound=Program)


class ProgramCluster(Generic[AnyProgram]):
    """Programs that belong together, all on this machine; leave the block to stop them."""

    nodes: list[AnyProgram]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Self:
        """Start all of them. Raises ServerError."""
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
        """End all of them."""
        for node in self.nodes:
            node.kill()

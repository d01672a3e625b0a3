"""Start the demo's processes, restart those that were killed, and stop all of them at the end, even after an error."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from django.conf import settings

STOP_SECONDS = 15
LOG_LINES = 20


class DemoError(Exception):
    """Raised when the demo cannot continue; the text is the reason."""


class Process:
    """
    One process, in a separate session, so that Ctrl-C reaches only the demo, which then stops the process.

    Args:
        log: the file for its output.
        inherits: file descriptors that it inherits from the demo.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, inherits: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.command = command
        self.environment = environment
        self.log = log
        self.inherits = inherits
        self.is_held = False  # whether `Processes.tend` leaves it dead after a kill
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                [*_follow_parent(), *self.command],
                cwd=settings.BASE_DIR,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self.inherits,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs, and before it was started."""
        return self._popen.poll() if self._popen else None

    def ask_to_stop(self) -> None:
        if self._popen and self._popen.poll() is None:
            self._popen.terminate()

    def stop(self, deadline: float) -> bool:
        """Wait until the process has ended. After the deadline (monotonic), kill it with its children and return False."""
        if self._popen is None:
            return True
        has_ended = True
        try:
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            has_ended = False
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the second one for a group that has ended
            os.killpg(self._popen.pid, signal.SIGKILL)  # for children for which the process did not wait
        self._popen.wait()
        return has_ended

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])


class Processes:
    """
    The demo's processes, as a context manager.

    Args:
        folder: the folder for their logs.
        environment: environment variables of all of them, in addition to those of the demo.
        check: called frequently; it raises an exception to end the demo.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], check: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self.environment = environment
        self.check = check
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        inherits: Sequence[int] = (),
    ) -> Process:
        """Start a long-running process."""
        own = {**self.environment, **(environment or {})}
        process = Process(name, command, own, self.folder / f"{name}.log", inherits)
        self._processes[name] = process
        process.start()
        return process

    def run(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """
        Run a process until it ends.

        Raises:
            DemoError: it failed.
        """
        process = self.start(name, command, environment)
        while process.exit_code is None:
            self.check()
            time.sleep(0.02)
        del self._processes[name]
        if process.exit_code:
            raise DemoError(f"{name} ended with exit code {process.exit_code}:\n{process.log_tail()}")

    def tend(self) -> None:
        """
        Restart killed processes, except held ones.

        Raises:
            DemoError: a process ended, but not with SIGKILL.
        """
        self.check()
        for process in self._processes.values():
            code = process.exit_code
            if code is None:
                continue
            if code != -signal.SIGKILL:
                raise DemoError(f"{process.name} ended with exit code {code}:\n{process.log_tail()}")
            if not process.is_held:
                process.start()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def hold(self, name: str) -> None:
        """Do not restart a killed process until `release`."""
        self._processes[name].is_held = True

    def release(self, name: str) -> None:
        """End a hold: restart the process if it is dead, now and after later kills."""
        self._processes[name].is_held = False
        self.tend()

    def stop(self) -> list[str]:
        """Stop all processes with SIGTERM; kill those that do not end in time, and return their names."""
        for process in self._processes.values():
            process.ask_to_stop()
        deadline = time.monotonic() + STOP_SECONDS
        killed = [process.name for process in self._processes.values() if not process.stop(deadline)]
        self._processes.clear()
        return killed


@cache
def _follow_parent() -> list[str]:
    """Return a command prefix with which Linux ends a process when its parent is killed; empty if setpriv cannot do that."""
    prefix = ["setpriv", "--pdeathsig", "TERM"]  # BusyBox' setpriv does not have this option
    if shutil.which(prefix[0]) and not subprocess.run([*prefix, "true"], capture_output=True).returncode:
        return prefix
    return []

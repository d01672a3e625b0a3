"""
A Spark job as a process of its own: started, listened to, ended in time. No JVM ever runs in the process that calls this.

The job holds the other end of a pipe and ends with it: whatever becomes of this process, nothing is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from tempfile import TemporaryFile
from typing import IO, Any

AUDIT_KEY = "OUTBOX_AUDIT_KEY"  # signs verdicts; no job is told it

LAST_WORDS = 40  # lines
LOOK_SECONDS = 0.2
GRACE_SECONDS = 60  # to put folders and the JVM away

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Ended:
    """
    How a job ended.

    Args:
        report: what it did or found; None where it said nothing.
        words: the last lines that it wrote to standard error.
        stopped_after: its time, where that was over.
    """

    exit_code: int
    report: dict[str, Any] | None
    words: str
    stopped_after: timedelta | None = None

    def why(self, mark: str) -> str:
        """Return in one line how it came to its end; `mark` begins the line in which the job itself says why."""
        if self.stopped_after is not None:
            return f": it was stopped after {self.stopped_after}."
        if self.exit_code < 0:
            return f": its process was ended by {signal.Signals(-self.exit_code).name}."
        lines = [line for line in self.words.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith(mark)), lines[-1] if lines else "")
        return f" (exit code {self.exit_code}). {said.removeprefix(mark)}".rstrip()


def run_job(
    module: str,
    config: str,
    *arguments: str,
    at_most: timedelta | None = None,
    say: Say,
) -> Ended:
    """
    Run a job and wait for it.

    Args:
        module: the job's; it takes `--config`, `--with-parent` and `--output`.
        config: as JSON, passwords included: it never gets a name on any disk.
        at_most: end the job after that time.
        say: is given what the job says, line by line.
    """
    with TemporaryFile("w+") as given, TemporaryFile("w+") as output:  # these have no name, and end with who holds them
        given.write(config)
        given.flush()
        given.seek(0)
        command = [sys.executable, "-m", module, "--with-parent", "--config", _path(given)]
        process = subprocess.Popen(
            [*command, "--output", _path(output), *arguments],
            env={name: value for name, value in os.environ.items() if name != AUDIT_KEY} | {"TZ": "UTC"},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[given.fileno(), output.fileno()],
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            words, stopped_after = _listen(process, at_most, say)
        finally:
            _end(process)
        code = process.returncode
        output.seek(0)
        said = output.read() if code in (0, 1) else ""
        return Ended(code, json.loads(said) if said else None, words, stopped_after)


def _path(inherited: IO[str]) -> str:
    """Return the path by which a process opens a file that it has inherited."""
    return f"/dev/fd/{inherited.fileno()}"


def _listen(process: subprocess.Popen[str], at_most: timedelta | None, say: Say) -> tuple[str, timedelta | None]:
    """Pass on what the job says until it ends, or its time is over."""
    assert process.stderr is not None
    last: deque[str] = deque(maxlen=LAST_WORDS)
    listener = threading.Thread(target=_pass_on, args=(process.stderr, last, say), daemon=True)
    listener.start()
    ends_at = None if at_most is None else time.monotonic() + at_most.total_seconds()
    is_over = False
    while process.poll() is None and not is_over:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
        is_over = ends_at is not None and time.monotonic() >= ends_at and process.returncode is None
    _end(process)
    listener.join(GRACE_SECONDS)
    return "\n".join(last), at_most if is_over else None


def _pass_on(stream: IO[str], last: deque[str], say: Say) -> None:
    for line in stream:
        last.append(line.rstrip())
        say(line.rstrip())


def _end(process: subprocess.Popen[str]) -> None:
    """Let go of the pipe, and make sure that nobody is left."""
    if process.stdin and not process.stdin.closed:
        process.stdin.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

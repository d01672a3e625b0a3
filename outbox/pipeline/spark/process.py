"""
Run a Spark job in a child process, with a time limit. No JVM ever runs in the calling process.

The child reads from a pipe and exits when the pipe is closed, so it never outlives its parent.
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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from tempfile import TemporaryFile
from typing import IO, Any

AUDIT_KEY = "OUTBOX_AUDIT_KEY"  # signs verdicts; removed from the environment of jobs

OUTPUT_LINES = 40  # lines
POLL_SECONDS = 0.2
GRACE_SECONDS = 60  # to delete temporary folders and stop the JVM

Log = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class JobResult:
    """
    The result of a job.

    Args:
        report: its report; None if it failed.
        log_tail: the last lines of its standard error.
        stopped_after: the time limit, if it was exceeded.
    """

    exit_code: int
    report: dict[str, Any] | None
    log_tail: str
    stopped_after: timedelta | None = None

    def failure(self, prefix: str) -> str:
        """Return the reason of a failure in one line; in the log, `prefix` marks the line with the job's own reason."""
        if self.stopped_after is not None:
            return f": it was stopped after {self.stopped_after}."
        if self.exit_code < 0:
            return f": its process was ended by {signal.Signals(-self.exit_code).name}."
        lines = [line for line in self.log_tail.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.startswith(prefix)), lines[-1] if lines else "")
        return f" (exit code {self.exit_code}). {reason.removeprefix(prefix)}".rstrip()


def run_job(
    module: str,
    config: str,
    *arguments: str,
    at_most: timedelta | None = None,
    log: Log,
) -> JobResult:
    """
    Run a job and wait for it. `seconds` of its report becomes the time that this took, with the start of its process.

    Args:
        module: the job's module; it takes `--config`, `--with-parent` and `--output`.
        config: its configuration as JSON, with passwords, so it is passed in a file without a name.
        at_most: the time limit.
        log: called with each line of the job's log.
    """
    started = time.monotonic()
    with TemporaryFile("w+") as given, TemporaryFile("w+") as output:  # no other process can open these files
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
            log_tail, stopped_after = _listen(process, at_most, log)
        finally:
            _end(process)
        code = process.returncode
        output.seek(0)
        report = json.loads(output.read() or "null") if code in (0, 1) else None
        if report is not None:
            report["seconds"] = round(time.monotonic() - started, 2)
        return JobResult(code, report, log_tail, stopped_after)


def _path(inherited: IO[str]) -> str:
    """Return the path under which the child process can open an inherited file."""
    return f"/dev/fd/{inherited.fileno()}"


def _listen(process: subprocess.Popen[str], at_most: timedelta | None, log: Log) -> tuple[str, timedelta | None]:
    """Pass on the job's log until it ends or is out of time. Return the last lines, and the time limit if it was exceeded."""
    last: deque[str] = deque(maxlen=OUTPUT_LINES)
    listener = threading.Thread(target=_pass_on, args=(process.stderr or (), last, log), daemon=True)
    listener.start()
    ends_at = None if at_most is None else time.monotonic() + at_most.total_seconds()
    is_timed_out = False
    while process.poll() is None and not is_timed_out:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        is_timed_out = ends_at is not None and time.monotonic() >= ends_at and process.returncode is None
    _end(process)
    listener.join(GRACE_SECONDS)
    return "\n".join(last), at_most if is_timed_out else None


def _pass_on(stream: Iterable[str], last: deque[str], log: Log) -> None:
    for line in stream:
        last.append(line.rstrip())
        log(line.rstrip())


def _end(process: subprocess.Popen[str]) -> None:
    """Close the pipe, so that the child exits; kill it if it does not."""
    if process.stdin and not process.stdin.closed:
        process.stdin.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

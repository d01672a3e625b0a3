"""The Spark job as a process: started, listened to, ended in time. No JVM ever runs in the process that calls this."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from outbox.audit_runs import verdict
from outbox.pipeline.config import PipelineConfig

JOB = "outbox.pipeline.jobs.audit"
LAST_WORDS = 40  # lines
GRACE_SECONDS = 20  # to put its folder and its JVM away

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Ended:
    """
    How a job ended.

    Args:
        report: what it found; None where it gave no answer.
        words: the last lines that it said.
    """

    exit_code: int
    report: dict[str, Any] | None
    words: str
    is_stopped: bool = False


def run_job(config: PipelineConfig, *, history: str = "", at_most: timedelta | None = None, say: Say) -> Ended:
    """
    Run the audit's job and wait for it.

    The job holds the other end of a pipe and ends with it: whatever becomes of this process, nothing is left behind.

    Args:
        history: a folder that keeps what was read; empty: none does.
        at_most: end the job after that time.
        say: is given what the job says, line by line.
    """
    with tempfile.TemporaryDirectory(prefix="outbox-audit-") as folder:
        given, output = Path(folder, "config.json"), Path(folder, "report.json")
        given.write_text(config.to_json())  # holds passwords: the folder is ours alone
        command = [sys.executable, "-m", JOB, "--with-parent", "--config", str(given), "--output", str(output)]
        environment = {name: value for name, value in os.environ.items() if name != verdict.VARIABLE}
        process = subprocess.Popen(
            [*command, "--history", history],
            env={**environment, "TZ": "UTC"},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            words, is_stopped = _listen(process, at_most, say)
        finally:
            _end(process)
        code = process.returncode
        report = json.loads(output.read_text()) if code in (0, 1) and output.exists() else None
        return Ended(code, report, words, is_stopped)


def _listen(process: subprocess.Popen[str], at_most: timedelta | None, say: Say) -> tuple[str, bool]:
    """Pass on what the job says until it ends, or until its time is over."""
    assert process.stderr is not None
    last: deque[str] = deque(maxlen=LAST_WORDS)
    listener = threading.Thread(target=_pass_on, args=(process.stderr, last, say), daemon=True)
    listener.start()
    is_stopped = False
    try:
        process.wait(None if at_most is None else at_most.total_seconds())
    except subprocess.TimeoutExpired:
        is_stopped = True
        _end(process)
    listener.join(GRACE_SECONDS)
    return "\n".join(last), is_stopped


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

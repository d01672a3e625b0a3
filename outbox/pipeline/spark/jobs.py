"""
The jobs of Spark, audit and archive, and how to run one in a child process with a time limit. No JVM runs in the calling process.

    the caller -- configuration, pipe --> the job -- log, report, exit code --> the caller

The child reads from a pipe and exits when the pipe is closed, so it never outlives its parent. To run a job by hand, call
`python -m outbox.pipeline.spark.jobs audit --config audit.json`, or pass this file to spark-submit. Exit code: 0 no findings, or
all days that are due are archived; 1 findings, or days that were kept; 2 failed; 3 another archiver is running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.session import Steps, build_session

MODULE = "outbox.pipeline.spark.jobs"
AUDIT_KEY = "OUTBOX_AUDIT_KEY"  # the environment variable with the key that signs verdicts; jobs run without it

LOG_TAIL_LINES = 40
POLL_SECONDS = 0.2
GRACE_SECONDS = 60  # in which a job can delete temporary folders and stop the JVM, before it is killed

FAILED = "{job} failed: "  # the beginning of the line in the job's log that has the reason

Log = Callable[[str], object]  # called with each line of a job's log


@dataclass(frozen=True, slots=True)
class JobResult:
    """
    The result of a job.

    Args:
        report: the job's report; None if it failed.
        log_tail: the last lines of the job's log, which is its standard error.
        stopped_after: the time limit, if the job was stopped because it exceeded it.
    """

    job: str
    exit_code: int
    report: dict[str, Any] | None
    log_tail: str
    stopped_after: timedelta | None = None

    def failure(self) -> str:
        """Return the reason of a failure, as the end of a sentence such as "The audit failed"."""
        if self.stopped_after is not None:
            return f": it was stopped after {self.stopped_after}."
        if self.exit_code < 0:
            return f": its process was ended by {signal.Signals(-self.exit_code).name}."
        lines = [line for line in self.log_tail.splitlines() if line.strip()]
        prefix = FAILED.format(job=self.job.capitalize())
        reason = next((line for line in reversed(lines) if line.startswith(prefix)), lines[-1] if lines else "")
        return f" (exit code {self.exit_code}). {reason.removeprefix(prefix)}".rstrip()


def run_job(job: str, config: str, *arguments: str, at_most: timedelta | None = None, log: Log) -> JobResult:
    """
    Run a job in a child process, and wait for it. `seconds` in its report includes the start and the end of the process.

    Args:
        job: a name in `JOBS`.
        config: the configuration as JSON. It contains passwords, so it is passed in a file without a name.
        at_most: the time limit; None: none.
        log: called with each line of the job's log.
    """
    started = time.monotonic()
    with TemporaryFile("w+") as config_file, TemporaryFile("w+") as output:  # no other process can open these files
        config_file.write(config)
        config_file.flush()
        config_file.seek(0)
        command = [sys.executable, "-m", MODULE, job, "--with-parent", "--config", _inherited_path(config_file)]
        process = subprocess.Popen(
            [*command, "--output", _inherited_path(output), *arguments],
            env={name: value for name, value in os.environ.items() if name != AUDIT_KEY} | {"TZ": "UTC"},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[config_file.fileno(), output.fileno()],
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            log_tail, stopped_after = _wait_for(process, at_most, log)
        finally:
            _end(process)
        code = process.returncode
        output.seek(0)
        report = json.loads(output.read() or "null") if code in (0, 1) else None
        if report is not None:
            report["seconds"] = round(time.monotonic() - started, 2)
        return JobResult(job, code, report, log_tail, stopped_after)


def _inherited_path(inherited: IO[str]) -> str:
    """Return the path by which the child process can open a file that it inherits."""
    return f"/dev/fd/{inherited.fileno()}"


def _wait_for(process: subprocess.Popen[str], at_most: timedelta | None, log: Log) -> tuple[str, timedelta | None]:
    """
    Pass on the job's log until the job ends or exceeds the time limit, and end it.

    Returns:
        The last lines of the log, and the time limit if it was exceeded.
    """
    tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)

    def pass_on() -> None:
        for line in process.stderr or ():
            tail.append(line.rstrip())
            log(line.rstrip())

    listener = threading.Thread(target=pass_on, daemon=True)
    listener.start()
    deadline = None if at_most is None else time.monotonic() + at_most.total_seconds()
    is_timed_out = False
    while process.poll() is None and not is_timed_out:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        is_timed_out = deadline is not None and time.monotonic() >= deadline and process.returncode is None
    _end(process)
    listener.join(GRACE_SECONDS)
    return "\n".join(tail), at_most if is_timed_out else None


def _end(process: subprocess.Popen[str]) -> None:
    """Close the pipe, so that the child exits. Kill its process group if it does not."""
    if process.stdin and not process.stdin.closed:
        process.stdin.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def exit_with_parent() -> None:
    """Interrupt this process, as Ctrl-C does, when its parent ends or closes the pipe, so that it deletes its folders."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore SIGINT
    main = threading.main_thread().ident or 0

    def interrupt_at_end_of_pipe() -> None:
        while os.read(0, 1024):  # not sys.stdin: a thread that blocks in it breaks the interpreter's shutdown
            pass
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt_at_end_of_pipe, daemon=True).start()


def log(text: str) -> None:
    """Write a line to standard error, which is the log of a job."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def audit(options: Namespace) -> dict[str, Any]:
    """Start Spark, read the history and audit it. Return the report. Raises PipelineError."""
    config = PipelineConfig.from_file(options.config)
    steps, started = Steps(log), time.monotonic()
    with TemporaryDirectory(prefix="outbox-audit-", ignore_cleanup_errors=True) as folder:
        with steps("starting Spark"):
            spark = build_session(config, name="outbox audit", is_light=not config.outbox.is_postgres)
        try:
            # Imported after `build_session`, whose error says what to install if PySpark is missing.
            from outbox.pipeline.spark.audit import make_report

            report = make_report(spark, config, options.history or folder, steps)
        finally:
            spark.stop()
    return {**report, "seconds": round(time.monotonic() - started, 2), "steps": steps.seconds}


def archive(options: Namespace) -> dict[str, Any]:
    """Archive the days that are due. Return the report. Raises PipelineError."""
    from outbox.pipeline.spark.archiver import ArchiveConfig, archive_due  # psycopg is not needed by an audit of files

    return archive_due(ArchiveConfig.from_file(options.config), log).as_dict()


# name -> the job, and the part of its report that is empty if the exit code is 0
JOBS: dict[str, tuple[Callable[[Namespace], dict[str, Any]], str]] = {"audit": (audit, "findings"), "archive": (archive, "kept")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that the command line names, and write its report. Return the exit code."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="JSON, as --write-config of the command writes it"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, as JSON (default: standard output)")
    parser.add_argument("--history", default="", metavar="FOLDER", help="keep the history that an audit has read, as Parquet")
    parser.add_argument(
        "--with-parent", action="store_true", help="stop when standard input is closed, because the parent has ended"
    )
    options = parser.parse_args(arguments)
    if options.with_parent:
        exit_with_parent()
    run, problems = JOBS[options.job]
    try:
        report = run(options)
        text = f"{json.dumps(report)}\n"
        options.output.write_text(text) if options.output else sys.stdout.write(text)
        return int(bool(report[problems]))
    except PipelineError as error:
        reason, code = str(error), error.exit_code
    except KeyboardInterrupt:
        reason, code = "it was interrupted.", 2
    except Exception as error:  # Python would exit with 1, which would mean findings
        traceback.print_exception(error)
        lines = [type(error).__name__, *str(error).strip().splitlines()[:1]]
        reason, code = ": ".join(lines), 2
    log(FAILED.format(job=options.job.capitalize()) + reason)
    return code


if __name__ == "__main__":
    sys.exit(main())

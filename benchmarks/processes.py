"""Relays and consumers as the processes they are in production."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from django.db import connection

ROOT = Path(__file__).resolve().parent.parent


def command(*arguments: str, **environment: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a management command in the background; stop it at the end."""
    return _run([sys.executable, "manage.py", *arguments], environment)


def program(*arguments: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run any program in the background; stop it at the end."""
    return _run(arguments, {})


def module(name: str, *arguments: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a module of the benchmarks in the background; stop it at the end."""
    return _run([sys.executable, "-m", name, *arguments], {})


@contextmanager
def celery() -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker with two children, and beat, beside us; wakeups reach it, tasks being files in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        worker = [sys.executable, "-m", "celery", "-A", "project", "worker", "--queues", "outbox,shop", "--concurrency", "2"]
        worker += ["--loglevel", "WARNING", "--beat", "--schedule", f"{folder}/beat"]
        worker += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        with _celery_files(folder), _run(worker, {}) as process:
            yield process


@contextmanager
def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "benchmarks.settings", **environment},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def _celery_files(folder: str) -> Iterator[None]:
    """Configure Celery here and in the worker to exchange wakeups as files in a folder."""
    from project.celery import app

    options = app.conf.broker_transport_options
    before, options["folder"] = options["folder"], folder
    os.environ["CELERY_FILES_DIR"] = folder
    try:
        yield
    finally:
        del os.environ["CELERY_FILES_DIR"]
        options["folder"] = before


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Poll each millisecond until the condition holds; return that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.001)
    return time.monotonic()


def count(query: str, *parameters: object) -> int:
    """Return the number that a query selects."""
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        row = cursor.fetchone()
    return int(row[0])


def is_stopped(pid: int) -> bool:
    """Return whether all threads of a process are stopped. Linux."""
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").iterdir())


def is_up(relay: subprocess.Popen[bytes]) -> bool:
    """Return whether a relay has written its heartbeat."""
    return count("SELECT count(*) FROM outbox_process WHERE kind = 'relay' AND pid = %s", relay.pid) > 0

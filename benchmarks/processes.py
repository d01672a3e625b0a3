"""Relays and consumers as the processes they are in production."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from django.db import connection

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a management command beside us; it is told to stop at the end."""
    process = subprocess.Popen(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "benchmarks.settings", **environment},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait, looking each millisecond; give the time at which it held."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.001)
    return time.monotonic()


def count(query: str, *parameters: object) -> int:
    """Give the number that a query finds."""
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        row = cursor.fetchone()
    return int(row[0])


def is_up(relay: subprocess.Popen[bytes]) -> bool:
    """Whether a relay has said that it is at its post."""
    return count("SELECT count(*) FROM outbox_process WHERE kind = 'relay' AND pid = %s", relay.pid) > 0

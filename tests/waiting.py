"""Wait for a condition, with a deadline; and have threads begin at once."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from outbox.database import Connection

T = TypeVar("T")
Argument = TypeVar("Argument")

# Not pg_stat_activity: within a transaction that stays as it was first read.
WAITS_FOR_ME = "SELECT pid FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"


def wait_until(condition: Callable[[], T], seconds: float = 30) -> T:
    """Return the first true value of a condition."""
    began = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - began
        assert waited < seconds, f"waited for {seconds} s"
        time.sleep(min(0.01 + waited / 20, 0.05))  # each look takes CPU from the awaited process
    return value


def wait_until_it_blocks(holder: Connection) -> int:
    """Wait until somebody waits for a lock of that connection; return the process id of that somebody's backend."""
    (pid,) = wait_until(lambda: holder.execute(WAITS_FOR_ME).fetchone())
    return int(pid)


def run_at_once(work: Callable[[Argument], T], *arguments: Argument) -> list[T]:
    """Call a function with each of the arguments, each in a thread of its own and all at once; return what it returned."""
    start = threading.Barrier(len(arguments), timeout=30)

    def call(argument: Argument) -> T:
        start.wait()
        return work(argument)

    with ThreadPoolExecutor(len(arguments)) as threads:
        return list(threads.map(call, arguments))

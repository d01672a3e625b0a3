"""Wait for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from outbox.database import Connection

IS_WAITING = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"


def wait_until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited for {seconds} s"
        time.sleep(0.01)


def wait_until_locked_out(waiting: Connection, observer: Connection) -> None:
    """Wait until a connection waits for a lock, as another sees it."""
    wait_until(lambda: observer.execute(IS_WAITING, [waiting.info.backend_pid]).fetchone())

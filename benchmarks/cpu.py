"""CPU time of this process's work and of the PostgreSQL backends that serve it."""

from __future__ import annotations

import time
from pathlib import Path

from outbox.database import Connection


class CpuClock:
    """
    Reads the CPU seconds that this process and some backends have used. Linux, server on the same machine.

    Args:
        backends: process ids of others that work for this process, too.
    """

    def __init__(self, connection: Connection, *backends: int) -> None:
        pids = (connection.info.backend_pid, *backends)
        self._backends = [Path(f"/proc/{pid}/schedstat") for pid in pids]  # nanoseconds; `stat` has hundredths of seconds

    def __call__(self) -> float:
        return time.process_time() + sum(int(one.read_text().split()[0]) for one in self._backends) / 1e9

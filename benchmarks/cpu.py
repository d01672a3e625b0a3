"""CPU time of this thread's work and of the PostgreSQL backend that serves it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from outbox.database import Connection

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class CpuClock:
    """Reads the CPU seconds that this process and one backend have used. Linux, server on the same machine."""

    def __init__(self, connection: Connection) -> None:
        self.backend = Path(f"/proc/{connection.info.backend_pid}/stat")

    def __call__(self) -> float:
        fields = self.backend.read_text().rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

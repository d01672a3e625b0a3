"""The resident memory of a relay that sends a million waiting messages."""

from __future__ import annotations

from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.history import empty, fill
from benchmarks.processes import command, count, is_up, wait_until
from outbox import database
from outbox.topics import topic_id

SENT = "SELECT coalesce(sum(cardinality(message_ids)), 0) FROM outbox_batch WHERE state = 3"


def measure(scale: float) -> list[Figure]:
    """Relay the first tenth of them; return the peak of the relay's memory."""
    waiting = int(1_000_000 * scale)
    with database.connect("default") as connection:
        empty(connection)
        fill(connection, [topic_id("bench-null-one-phase", "default")], waiting)
        with command("outbox_relay", "--broker", "null") as relay:
            wait_until(lambda: is_up(relay) and count(SENT) >= waiting // 10, 120, "a tenth of the messages sent")
            peak = peak_mib(relay.pid)
        empty(connection)
    return [Figure("relay's memory with 1,000,000 waiting", peak, "MiB", 100, at_most=True)]


def peak_mib(pid: int) -> float:
    """Read the peak of a process's resident memory. Linux."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

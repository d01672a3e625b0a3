"""Heartbeats: each relay, consumer and checker says in a row that it lives."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from outbox.database import Connection

STALE_AFTER = timedelta(minutes=5)

BEAT = """
INSERT INTO outbox_process (kind, host, pid, broker, consumer_group, lane, breaker, note)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (kind, host, pid, broker, consumer_group) DO UPDATE
SET lane = excluded.lane, breaker = excluded.breaker, note = excluded.note, beat_at = clock_timestamp()
"""

LEAVE = "DELETE FROM outbox_process WHERE kind = %s AND host = %s AND pid = %s AND broker = %s AND consumer_group = %s"

# The newest row says it: a host may run several, and those that were killed leave rows behind.
SILENCE = """
SELECT extract(epoch FROM clock_timestamp() - max(beat_at))::float8 FROM outbox_process WHERE kind = %s AND host = %s
"""

FORGET_STALE = "DELETE FROM outbox_process WHERE beat_at < clock_timestamp() - %s"


def beat(
    connection: Connection,
    kind: str,
    *,
    broker: str = "",
    consumer_group: str = "",
    lane: int | None = None,
    breaker: str = "closed",
    note: str = "",
) -> None:
    """Say that this process lives, as a relay, consumer or checker (`kind`) of that broker and group."""
    who = [kind, socket.gethostname(), os.getpid(), broker, consumer_group]
    connection.execute(BEAT, [*who, lane, breaker, note])


def leave(connection: Connection, kind: str, *, broker: str = "", consumer_group: str = "") -> None:
    """Take this process's row away: it ends as it should."""
    connection.execute(LEAVE, [kind, socket.gethostname(), os.getpid(), broker, consumer_group])


def silence(connection: Connection, kind: str) -> float | None:
    """Say how many seconds ago a process of that kind on this host was last heard of; None: never, or it left."""
    found = connection.execute(SILENCE, [kind, socket.gethostname()]).fetchone()
    return found[0] if found else None


def forget_stale(connection: Connection, *, after: timedelta = STALE_AFTER) -> int:
    """Delete the rows of processes that have been silent for that long; give how many."""
    return connection.execute(FORGET_STALE, [after]).rowcount

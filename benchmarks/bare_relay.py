"""
The least that relays: plain psycopg, one connection, told of new rows by the transactions that write them.

    python -m benchmarks.bare_relay CONNINFO FILE    until it is told to stop; the times at which rows were handed over go to FILE

No fence, no numbers, no batches, no half messages.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psycopg

from benchmarks.sent_times import SentTimes

TABLE = """
DROP TABLE IF EXISTS bench_bare_waiting, bench_bare_ready;
CREATE TABLE bench_bare_waiting (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body bytea NOT NULL);
CREATE TABLE bench_bare_ready (pid int)
"""

PUBLISH = """
WITH m AS (INSERT INTO bench_bare_waiting (body) VALUES (%s) RETURNING id) SELECT id, pg_notify('bench_bare', '') FROM m
"""

CLAIM = "SELECT id, body FROM bench_bare_waiting ORDER BY id LIMIT 500 FOR UPDATE SKIP LOCKED"
DELETE = "DELETE FROM bench_bare_waiting WHERE id = ANY(%s)"

POLL_SECONDS = 1.0


def main(conninfo: str, path: Path) -> None:
    """Relay until SIGTERM."""
    times = SentTimes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("LISTEN bench_bare")
            connection.execute("INSERT INTO bench_bare_ready VALUES (%s)", [connection.info.backend_pid])
            while True:
                if not _relay(connection, times):
                    for _ in connection.notifies(timeout=POLL_SECONDS, stop_after=1):
                        pass
    finally:
        times.write(path)


def _relay(connection: psycopg.Connection, times: SentTimes) -> int:
    """Send the waiting rows and delete them; return their number."""
    with connection.transaction():
        rows = connection.execute(CLAIM).fetchall()
        for number, _ in rows:
            times.note(str(number))
        if rows:
            connection.execute(DELETE, [[number for number, _ in rows]])
    return len(rows)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

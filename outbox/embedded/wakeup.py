"""
Waiting for messages: a consumer that found nothing says so, looks once more, and is told.

A message that becomes visible between the look and the telling is found by the poll a second later: being told is for
speed, never for safety. Behind a pooler nobody is told: there a consumer looks again soon, then less and less often.
"""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.database import Connection
from outbox.embedded import receiver
from outbox.embedded.client import Client
from outbox.embedded.receiver import Reader
from outbox.embedded.rows import ReadRow

POLL_SECONDS = 1.0
POOLED_POLL_SECONDS = 0.05  # the first wait behind a pooler; each that was in vain doubles the next

SAY_IDLE = "INSERT INTO outbox_embedded_idle (pid) VALUES (pg_backend_pid()) ON CONFLICT DO NOTHING"
SAY_BUSY = "DELETE FROM outbox_embedded_idle WHERE pid = pg_backend_pid()"


def take(link: Client, reader: Reader, limit: int, wait: timedelta) -> list[ReadRow]:
    """Take messages as `receiver.take` does; when there are none, wait up to that long for the first."""
    deadline = time.monotonic() + wait.total_seconds()
    connection = link.connection()
    is_idle = False
    pause = POOLED_POLL_SECONDS
    try:
        while True:
            found = receiver.take(connection, reader, limit)
            left = deadline - time.monotonic()
            if found or left <= 0 or link.is_closing:
                return found
            if is_idle:
                _wait(connection, min(left, receiver.seconds_to_next(connection, reader) or POLL_SECONDS))
            elif link.listen():
                connection.execute(SAY_IDLE)
                is_idle = True
            else:
                time.sleep(min(left, pause))
                pause = min(pause * 2, POLL_SECONDS)
    finally:
        if is_idle and not connection.closed:
            connection.execute(SAY_BUSY)


def _wait(connection: Connection, seconds: float) -> None:
    for _ in connection.notifies(timeout=min(seconds, POLL_SECONDS), stop_after=1):
        pass

"""
The frames of `outbox.pipeline.spark.schemas` as temporary tables, filled with one window of the live ones.

In one REPEATABLE READ transaction that is rolled back: all rows are of one moment, and nothing stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any

import psycopg

from outbox import database
from outbox.database import Connection
from outbox.pipeline.errors import WindowTooLarge

FRAMES = """
CREATE TEMP TABLE quick_business (subject text, about text, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_messages (message_id text, topic text, key text, type text, about text, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_places (source text, topic text, lane smallint, number bigint, message_id text, state text,
    claimed_at timestamptz, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_broker (source text, topic text, lane smallint, number bigint, message_id text, key text,
    queue int, pos bigint, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_inbox (consumer_group text, source text, topic text, lane smallint, number bigint, message_id text,
    nth int, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_attempts (consumer_group text, source text, topic text, lane smallint, number bigint, message_id text,
    nth int, outcome text, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_marks (source text, topic text, lane smallint, first bigint, last bigint) ON COMMIT DROP;
CREATE TEMP TABLE quick_groups (name text, topic text, is_from_start boolean) ON COMMIT DROP;
CREATE TEMP TABLE quick_entries (nth int, name text, topic text, type text, about text) ON COMMIT DROP;
"""

GROUP = "INSERT INTO quick_groups VALUES (%s, %s, %s)"
ENTRY = "INSERT INTO quick_entries VALUES (%s, %s, %s, %s, %s)"

NOW = "SELECT clock_timestamp()"

# Whoever stands still keeps neither days from being dropped nor vacuum from its work. Between two statements findings are put
# together, which takes seconds at most.
END_IDLE = "SELECT set_config('idle_in_transaction_session_timeout', %s, true)"
SHORTEST_IDLE = 5.0


@dataclass
class Check:
    """
    One quick check's transaction.

    Args:
        limit: no frame takes more rows.
        deadline: by this process's monotonic clock; no statement works longer.
    """

    connection: Connection
    limit: int
    deadline: float

    def run(self, statement: str, arguments: Any = None) -> psycopg.Cursor[tuple[Any, ...]]:
        """Execute a statement in what is left of the time. Raises WindowTooLarge."""
        left = int((self.deadline - monotonic()) * 1000)
        try:
            if left <= 0:
                raise psycopg.errors.QueryCanceled
            self.connection.execute(f"SET LOCAL statement_timeout = {left}".encode())
            return self.connection.execute(statement.encode(), arguments)
        except psycopg.errors.QueryCanceled as error:
            raise WindowTooLarge("The window takes too long to look at. Choose a shorter one, or run outbox_audit.") from error

    def fill(self, frame: str, query: str, arguments: Any) -> int:
        """Put the rows of a query into a frame; return how many. Raises WindowTooLarge."""
        count = self.run(f"INSERT INTO {frame} SELECT * FROM ({query}) q LIMIT {self.limit + 1}", arguments).rowcount
        if count > self.limit:
            raise WindowTooLarge(
                f"The window holds more than {self.limit:,} rows of one kind. Choose a shorter one, or run outbox_audit."
            )
        return count


@contextmanager
def opened(using: str, *, limit: int, seconds: float) -> Iterator[tuple[Check, datetime]]:
    """Return a check with empty frames, and the database's time; at the end all of it is gone."""
    with database.connect(using, application_name="outbox quick check") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with connection.transaction(force_rollback=True):
            check = Check(connection, limit, monotonic() + seconds)
            check.run(END_IDLE, [f"{max(SHORTEST_IDLE, 2 * seconds):.0f}s"])
            check.run(FRAMES)
            (now,) = check.run(NOW).fetchone() or (None,)
            assert now is not None
            yield check, now

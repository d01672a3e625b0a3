"""What the database knows of its archive: one row per day, `outbox_archived_day`, and the lock of whoever archives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import psycopg

from outbox.database.locks import END_IDLE_SESSION, Lock
from outbox.pipeline.spark.errors import ArchiverBusy, HistoryError
from outbox.pipeline.spark.keep_alive import keep_alive
from outbox.pipeline.spark.lake.commit import Commit

if TYPE_CHECKING:
    Connection = psycopg.Connection[tuple[Any, ...]]

# One archiver at a time; the lock ends with the connection, which of one that was killed may take the server a moment.
LOCK_ARCHIVE = f"SELECT pg_advisory_lock({Lock.ARCHIVE}, 0)"
WAIT_A_MOMENT = "SET lock_timeout = '3s'"
WAIT = "SET lock_timeout = 0"
UNLOCK_ARCHIVE = f"SELECT pg_advisory_unlock({Lock.ARCHIVE}, 0)"

# Days that have a partition, and those that were begun.
LIST_DAYS = """
SELECT to_date(right(c.relname, 8), 'YYYYMMDD') FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'outbox_message'::regclass AND c.relname <> 'outbox_message_default'
UNION SELECT day FROM outbox_archived_day WHERE state <> 'deleted' ORDER BY 1
"""

READ = "SELECT state, attempt FROM outbox_archived_day WHERE day = %s"
READ_DELETED = "SELECT day, attempt FROM outbox_archived_day WHERE state = 'deleted'"
READ_COMMITTED = "SELECT day, attempt FROM outbox_archived_day WHERE state IN ('committed', 'deleted')"
READ_SOURCE = "SELECT id FROM outbox_source"

# A day is planned again when its attempt came to nothing, when it changed, and when something came into it later.
PLAN = """
INSERT INTO outbox_archived_day (day, state, attempt, rows, digest, manifest, planned_at)
VALUES (%(day)s, 'planned', %(attempt)s, %(rows)s, %(digest)s, '', clock_timestamp())
ON CONFLICT (day) DO UPDATE SET state = 'planned', attempt = excluded.attempt, rows = excluded.rows, digest = excluded.digest,
    manifest = '', planned_at = excluded.planned_at, committed_at = NULL, deleted_at = NULL
"""

COMMITTED = """
UPDATE outbox_archived_day SET state = 'committed', manifest = %(manifest)s, committed_at = clock_timestamp()
WHERE day = %(day)s AND state = 'planned' AND attempt = %(attempt)s
"""

# The database holds other rows of the day than the lake: all that is there is archived again.
CHANGED = "UPDATE outbox_archived_day SET state = 'changed' WHERE day = %(day)s AND attempt = %(attempt)s"

DELETED = """
UPDATE outbox_archived_day SET state = 'deleted', deleted_at = clock_timestamp()
WHERE day = %(day)s AND state = 'committed' AND attempt = %(attempt)s
"""


@dataclass(frozen=True)
class DayRecord:
    """A day as the database knows it. `state`: planned, committed, changed or deleted."""

    state: str
    attempt: int


@contextmanager
def archive_lock(url: str) -> Iterator[Connection]:
    """
    Be the one archiver of a database, on a connection in autocommit.

    Raises:
        ArchiverBusy: somebody else is.
        HistoryError: the database cannot be reached.
    """
    try:
        connection: Connection = psycopg.connect(url, application_name="outbox archive", autocommit=True)
    except psycopg.Error as error:
        raise HistoryError(f"The database cannot be reached: {str(error).strip()}") from error
    with connection:
        connection.execute("SET jit = off")
        connection.execute("SET TIME ZONE 'UTC'")
        try:
            connection.execute(WAIT_A_MOMENT)
            connection.execute(LOCK_ARCHIVE)
        except psycopg.errors.LockNotAvailable as error:
            raise ArchiverBusy("Another archiver is at work on this database. It goes on; there is nothing to do.") from error
        connection.execute(WAIT)
        connection.execute(END_IDLE_SESSION)
        with keep_alive(connection):
            yield connection
        connection.execute(UNLOCK_ARCHIVE)


def days(connection: Connection, before: date) -> list[date]:
    """List the days to be archived, oldest first."""
    return [day for (day,) in connection.execute(LIST_DAYS) if day < before]


def read(connection: Connection, day: date) -> DayRecord | None:
    """Return what is known of a day."""
    row = connection.execute(READ, [day]).fetchone()
    return None if row is None else DayRecord(*row)


def deleted(connection: Connection) -> dict[str, int]:
    """Return the days that the lake alone has -> their attempt."""
    return {str(day): attempt for day, attempt in connection.execute(READ_DELETED)}


def committed(connection: Connection) -> dict[str, int]:
    """Return the days that the lake has for good -> their attempt: those, and what is still to be deleted."""
    return {str(day): attempt for day, attempt in connection.execute(READ_COMMITTED)}


def source(connection: Connection) -> str:
    """Return the id of this database's outbox."""
    row = connection.execute(READ_SOURCE).fetchone()
    assert row is not None
    return str(row[0])


def plan(connection: Connection, day: date, attempt: int, rows: int, digest: str) -> None:
    """Write down what is to be archived."""
    fields = {"day": day, "attempt": attempt, "rows": rows, "digest": digest}
    connection.execute(PLAN, fields)


def mark_committed(connection: Connection, commit: Commit, manifest: str) -> None:
    """Write down that the lake has it. Where that is known already, nothing changes."""
    connection.execute(COMMITTED, {"day": commit.day, "attempt": commit.attempt, "manifest": manifest})


def mark_changed(connection: Connection, commit: Commit) -> None:
    """Write down that the day has to be archived once more."""
    connection.execute(CHANGED, {"day": commit.day, "attempt": commit.attempt})


def mark_deleted(connection: Connection, commit: Commit) -> None:
    """Write down that only the lake has it; within the transaction that deletes."""
    connection.execute(DELETED, {"day": commit.day, "attempt": commit.attempt})


def now(connection: Connection) -> datetime:
    """Return the database's time."""
    row = connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    moment: datetime = row[0]
    return moment

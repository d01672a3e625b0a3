"""
The archive's records in the database: one row for each day in `outbox_archived_day`, and the archive lock.

    2026-11-01: planned, attempt 1 -> committed (in lake and database) -> deleted (only in the lake)
                                                                       -> changed -> planned, attempt 2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from typing import TYPE_CHECKING, Any

import psycopg

from outbox.database.locks import END_IDLE_SESSION, Lock
from outbox.database.retention_holds import FROM_DAYS
from outbox.pipeline.spark import ArchiverBusy, HistoryError
from outbox.pipeline.spark.lake import Commit
from outbox.pipeline.spark.statements import keep_alive

if TYPE_CHECKING:
    Connection = psycopg.Connection[tuple[Any, ...]]


# One archiver at a time holds this lock. The server releases it when the connection ends. If an archiver was killed, the
# server may notice that late.
LOCK_ARCHIVE = f"SELECT pg_advisory_lock({Lock.ARCHIVE}, 0)"
SET_LOCK_TIMEOUT = "SET lock_timeout = '3s'"
RESET_LOCK_TIMEOUT = "SET lock_timeout = 0"
UNLOCK_ARCHIVE = f"SELECT pg_advisory_unlock({Lock.ARCHIVE}, 0)"

# Days that have a partition, and days whose archive is not finished.
LIST_DAYS = f"""
SELECT to_date(right(c.relname, 8), 'YYYYMMDD') {FROM_DAYS}
UNION SELECT day FROM outbox_archived_day WHERE state <> 'deleted' ORDER BY 1
"""  # noqa: S608  (no value in it)

READ = "SELECT state, attempt FROM outbox_archived_day WHERE day = %s"
READ_DELETED = "SELECT day, attempt FROM outbox_archived_day WHERE state = 'deleted'"
READ_COMMITTED = "SELECT day, attempt FROM outbox_archived_day WHERE state IN ('committed', 'deleted')"
READ_SOURCE = "SELECT id FROM outbox_source"

# A day is planned again after an attempt that failed, if its rows have changed, and if it got new rows after it was deleted.
PLAN = """
INSERT INTO outbox_archived_day (day, state, attempt, rows, digest, manifest, planned_at)
VALUES (%(day)s, 'planned', %(attempt)s, %(rows)s, %(digest)s, '', clock_timestamp())
ON CONFLICT (day) DO UPDATE SET state = 'planned', attempt = excluded.attempt, rows = excluded.rows, digest = excluded.digest,
    manifest = '', planned_at = excluded.planned_at, committed_at = NULL, deleted_at = NULL
"""

# The day's manifest is in the lake.
COMMITTED = """
UPDATE outbox_archived_day SET state = 'committed', manifest = %(manifest)s, committed_at = clock_timestamp()
WHERE day = %(day)s AND state = 'planned' AND attempt = %(attempt)s
"""

# The day's rows in the database differ from those in the lake, so the day will be archived again.
CHANGED = "UPDATE outbox_archived_day SET state = 'changed' WHERE day = %(day)s AND attempt = %(attempt)s"

# Executed in the transaction that deletes the day.
DELETED = """
UPDATE outbox_archived_day SET state = 'deleted', deleted_at = clock_timestamp()
WHERE day = %(day)s AND state = 'committed' AND attempt = %(attempt)s
"""


@contextmanager
def archive_lock(url: str) -> Iterator[Connection]:
    """
    Hold the archive lock of a database, on a connection in autocommit.

    Raises:
        ArchiverBusy: another archiver holds it.
        HistoryError: the database cannot be reached.
    """
    try:
        connection: Connection = psycopg.connect(url, application_name="outbox archive", autocommit=True)
    except psycopg.Error as error:
        raise HistoryError(f"The database cannot be reached: {str(error).strip()}") from error
    with connection:
        connection.execute("SET jit = off; SET TIME ZONE 'UTC'; SET standard_conforming_strings = on")
        try:
            connection.execute(SET_LOCK_TIMEOUT)
            connection.execute(LOCK_ARCHIVE)
        except psycopg.errors.LockNotAvailable as error:
            raise ArchiverBusy("Another archiver of this database is running. There is nothing to do.") from error
        connection.execute(RESET_LOCK_TIMEOUT)
        connection.execute(END_IDLE_SESSION)
        with keep_alive(connection):
            yield connection
        connection.execute(UNLOCK_ARCHIVE)


def days(connection: Connection, before: date) -> list[date]:
    """Return the days before a date that are to be archived, oldest first."""
    return [day for (day,) in connection.execute(LIST_DAYS) if day < before]


def read(connection: Connection, day: date) -> tuple[str, int]:
    """Return a day's state (planned, committed, changed or deleted) and its last attempt; "" and 0 if it has no record."""
    for state, attempt in connection.execute(READ, [day]):
        return state, attempt
    return "", 0


def deleted(connection: Connection) -> dict[str, int]:
    """Return the days that were deleted from the database, and are only in the lake -> their attempt."""
    return {str(day): attempt for day, attempt in connection.execute(READ_DELETED)}


def committed(connection: Connection) -> dict[str, int]:
    """Return the days that are committed to the lake, whether they were deleted from the database or not -> their attempt."""
    return {str(day): attempt for day, attempt in connection.execute(READ_COMMITTED)}


def source(connection: Connection) -> str:
    """Return the source id of this database."""
    for (source,) in connection.execute(READ_SOURCE):
        return str(source)
    raise HistoryError("The table outbox_source is empty. Run manage.py migrate, which writes a new id.")


def plan(connection: Connection, day: date, attempt: int, rows: int, digest: str) -> None:
    """Record that a day is being archived."""
    connection.execute(PLAN, {"day": day, "attempt": attempt, "rows": rows, "digest": digest})


def mark(connection: Connection, statement: str, commit: Commit) -> None:
    """Record a step of a commit; `statement` is `COMMITTED`, `CHANGED` or `DELETED`. A second call changes nothing."""
    connection.execute(statement, {"day": commit.day, "attempt": commit.attempt, "manifest": commit.to_json()})

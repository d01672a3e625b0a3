"""The last step: what the lake has goes out of the database, in one transaction."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from psycopg import errors

from outbox.database.locks import END_IDLE_TRANSACTION, LOCK_PARTITIONS
from outbox.database.retention_holds import find_holder
from outbox.failpoints import failpoint
from outbox.pipeline.spark.archive import records
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.lake.commit import Commit
from outbox.pipeline.spark.lake.frames import MESSAGES, TIMED_FRAMES, Span, digest_query

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]

DELETE = "DELETE FROM outbox_{name} WHERE {time} < '{end}'"

# Everybody queues behind a lock that waits, so it waits briefly.
WAIT_BRIEFLY = "SET LOCAL lock_timeout = '100ms'"
WAIT_FOR_ROWS = "SET LOCAL lock_timeout = '10s'"
IS_THERE = "SELECT to_regclass('{table}') IS NOT NULL"
LOCK_DAY = "LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"
COUNT = "SELECT count(*) FROM {table}"
DROP_DAY = "DROP TABLE {table}"


class DayChanged(PipelineError):
    """Raised when the database holds other rows of a day than the lake; nothing was deleted."""


class DayInUse(PipelineError):
    """Raised when a day cannot be dropped yet; nothing was deleted."""


def delete_day(connection: Connection, span: Span, commit: Commit, *, patience_seconds: float) -> None:
    """
    Drop a day's messages and delete the books up to its end, all or nothing.

    Raises:
        DayChanged: rows came, went or became others since they were read.
        DayInUse: something unfinished points into the day again, or open transactions read it.
    """
    _require_the_same(connection, span, commit)
    with connection.transaction():
        connection.execute(END_IDLE_TRANSACTION)
        connection.execute(WAIT_FOR_ROWS)
        for name, frame in TIMED_FRAMES.items():
            if name not in commit.frames:  # of an older version: the next day takes these rows
                continue
            wanted = commit.frames[name].rows
            deleted = _delete(connection, DELETE.format(name=name, time=frame.time, end=span.end))
            if deleted != wanted:
                raise DayChanged(f"outbox_{name} has {deleted} rows from before {span.end}, and the lake {wanted}")
        drop(connection, span, commit, time.monotonic() + patience_seconds)
        records.mark_deleted(connection, commit)
        failpoint("archive.in_delete")


def _delete(connection: Connection, statement: str) -> int:
    """Delete rows; return how many. Raise DayInUse where others lock one of them."""
    try:
        return connection.execute(statement.encode()).rowcount
    except errors.LockNotAvailable as error:
        raise DayInUse("open transactions") from error


def _require_the_same(connection: Connection, span: Span, commit: Commit) -> None:
    """Hold the messages to the lake once more, where no lock keeps anybody waiting."""
    if not _is_there(connection, span):
        return
    row = connection.execute(digest_query(MESSAGES, MESSAGES.query(span)).encode()).fetchone()
    wanted = commit.frames[MESSAGES.name]
    if row != (wanted.rows, wanted.digest):
        raise DayChanged("its messages are others than those that were archived")


def drop(connection: Connection, span: Span, commit: Commit, deadline: float) -> None:
    """Drop the day's table and what the archive took along, again and again until the deadline while others lock it."""
    while True:
        try:
            with connection.transaction():
                return _drop_at_once(connection, span, commit)
        except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
            if time.monotonic() >= deadline:
                raise DayInUse("open transactions") from error
            time.sleep(random.uniform(0.05, 0.2))  # noqa: S311  (lets those through that queued behind us)


def _drop_at_once(connection: Connection, span: Span, commit: Commit) -> None:
    connection.execute(WAIT_BRIEFLY)
    connection.execute(LOCK_PARTITIONS)
    if not _is_there(connection, span):  # by prune of an older version, or by hand
        return
    connection.execute(LOCK_DAY.format(table=span.table).encode())
    if holder := find_holder(connection, span.first_id, span.end_id):
        raise DayInUse(holder)
    row = connection.execute(COUNT.format(table=span.table).encode()).fetchone()
    if row != (commit.frames[MESSAGES.name].rows,):
        raise DayChanged("messages came into it")
    connection.execute(DROP_DAY.format(table=span.table).encode())


def _is_there(connection: Connection, span: Span) -> bool:
    return connection.execute(IS_THERE.format(table=span.table).encode()).fetchone() == (True,)

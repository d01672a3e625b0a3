"""The last step of the archive: delete a day from the database, in one transaction."""

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

# A message that was handled beside its deferred row would be handled again without its inbox row.
IS_DEFERRED = """
SELECT EXISTS (SELECT FROM outbox_deferred d JOIN outbox_inbox i ON i.message_id = d.message_id
    AND i.consumer_group = d.consumer_group WHERE i.handled_at < '{end}')
"""

# Other sessions queue after a lock request that waits, so it waits only briefly.
WAIT_BRIEFLY = "SET LOCAL lock_timeout = '100ms'"
WAIT_FOR_ROWS = "SET LOCAL lock_timeout = '10s'"
IS_THERE = "SELECT to_regclass('{table}') IS NOT NULL"
LOCK_DAY = "LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"
COUNT = "SELECT count(*) FROM {table}"
DROP_DAY = "DROP TABLE {table}"


class DayChanged(PipelineError):
    """Raised when the day's rows in the database differ from the lake; nothing was deleted."""


class DayInUse(PipelineError):
    """Raised when a day cannot be dropped yet; nothing was deleted."""


def delete_day(connection: Connection, span: Span, commit: Commit, *, patience_seconds: float) -> None:
    """
    Drop a day's messages, and delete the rows of the other tables up to its end, all or nothing.

    Raises:
        DayChanged: rows were added, deleted or changed since they were read.
        DayInUse: an unfinished batch refers to the day, open transactions lock it, or a handled message of it is deferred still.
    """
    _require_the_same(connection, span, commit)
    with connection.transaction():
        connection.execute(END_IDLE_TRANSACTION)
        connection.execute(WAIT_FOR_ROWS)
        if connection.execute(IS_DEFERRED.format(end=span.end)).fetchone() == (True,):
            raise DayInUse("messages that were handled and are deferred still, until outbox_relay or Celery's maintenance runs")
        for name, frame in TIMED_FRAMES.items():
            if name not in commit.frames:  # committed by an older version; the next day includes these rows
                continue
            wanted = commit.frames[name].rows
            deleted = _delete(connection, DELETE.format(name=name, time=frame.time, end=span.end))
            if deleted != wanted:
                raise DayChanged(f"outbox_{name} has {deleted} rows from before {span.end}, the lake {wanted}")
        drop(connection, span, commit, time.monotonic() + patience_seconds)
        records.mark_deleted(connection, commit)
        failpoint("archive.in_delete")


def _delete(connection: Connection, statement: str) -> int:
    """Delete rows and return their number. Raises DayInUse if one of them is locked."""
    try:
        return connection.execute(statement).rowcount
    except errors.LockNotAvailable as error:
        raise DayInUse("open transactions") from error


def _require_the_same(connection: Connection, span: Span, commit: Commit) -> None:
    """Compare the messages with the lake again, before any lock is taken."""
    if not _is_there(connection, span):
        return
    row = connection.execute(digest_query(MESSAGES, MESSAGES.query(span))).fetchone()
    wanted = commit.frames[MESSAGES.name]
    if row != (wanted.rows, wanted.digest):
        raise DayChanged("its messages differ from those that were archived")


def drop(connection: Connection, span: Span, commit: Commit, deadline: float) -> None:
    """Drop the day's table. Retry until the deadline while others lock it."""
    while True:
        try:
            with connection.transaction():
                return _drop_at_once(connection, span, commit)
        except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
            if time.monotonic() >= deadline:
                raise DayInUse("open transactions") from error
            time.sleep(random.uniform(0.05, 0.2))  # noqa: S311  (let the sessions through that queued after this one)


def _drop_at_once(connection: Connection, span: Span, commit: Commit) -> None:
    connection.execute(WAIT_BRIEFLY)
    connection.execute(LOCK_PARTITIONS)
    if not _is_there(connection, span):  # dropped by an older version, or manually
        return
    connection.execute(LOCK_DAY.format(table=span.table))
    if holder := find_holder(connection, span.first_id, span.end_id):
        raise DayInUse(holder)
    row = connection.execute(COUNT.format(table=span.table)).fetchone()
    if row != (commit.frames[MESSAGES.name].rows,):
        raise DayChanged("new messages came into it")
    connection.execute(DROP_DAY.format(table=span.table))


def _is_there(connection: Connection, span: Span) -> bool:
    return connection.execute(IS_THERE.format(table=span.table)).fetchone() == (True,)

"""
Move finished days to the lake: plan -> write -> verify -> commit -> delete. docs/how-to/archive.md explains the steps.

    outbox_message_20261101  -- Parquet, read back, manifest -->  lake  -- if the rows have not changed -->  DELETE, DROP the
    partition

A frame is a kind of rows that is archived, such as messages or inbox (`lake.py`).
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg import errors

from outbox.database.locks import END_IDLE_TRANSACTION, LOCK_PARTITIONS
from outbox.database.retention_holds import find_holder
from outbox.failpoints import failpoint
from outbox.pipeline.spark import LakeError, PipelineError, records
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.lake import (
    FRAMES,
    MESSAGES,
    TIMED_FRAMES,
    Commit,
    Frame,
    Lake,
    Span,
    WrittenFrame,
    digest_query,
    require_own_lake,
)
from outbox.pipeline.spark.statements import HIGHEST, NOW, exported_snapshot, is_out_of_range

if TYPE_CHECKING:
    Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class ArchiveConfig:
    """
    The configuration of an archive job.

    Args:
        pipeline: the outbox's database, and how to run Spark.
        lake: the folder of this database's lake.
        before: archive days before this one.
        patience_seconds: for how long to retry if other transactions lock a day that is to be dropped.
        rows_per_part: the approximate number of messages that are read over one connection and written to one file.
    """

    pipeline: PipelineConfig
    lake: str
    before: date
    patience_seconds: float = 10.0
    rows_per_part: int = 100_000

    def to_json(self) -> str:
        """Return the configuration as JSON, with passwords in URLs."""
        return json.dumps({**asdict(self), "pipeline": json.loads(self.pipeline.to_json()), "before": str(self.before)})

    @classmethod
    def from_file(cls, path: Path) -> ArchiveConfig:
        """
        Return the configuration that `to_json` has written.

        Raises:
            PipelineError: the file cannot be read, or is not such a configuration.
        """
        try:
            raw = json.loads(path.read_text())
            pipeline = PipelineConfig.from_json(json.dumps(raw.pop("pipeline")))
            return cls(pipeline=pipeline, **{**raw, "before": date.fromisoformat(raw["before"])})
        except (OSError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PipelineError(f"The configuration {path} cannot be read: {type(error).__name__}: {error}") from error


MAX_VALUES_NAMED = 3  # in the reason why a day is kept

FIND_UNREADABLE_MESSAGES = f"""
SELECT 'created_at of message ' || id || ' is ' || created_at FROM outbox_message
WHERE id >= %(first)s AND id < %(end)s AND {is_out_of_range("created_at")}
UNION ALL
SELECT w.name || ' of batch ' || b.id || ' with message ' || b.message_ids[1] || ' is ' || w.value
FROM outbox_batch b CROSS JOIN LATERAL (
    SELECT name, value::text FROM (
        VALUES ('claimed_at', b.claimed_at), ('decided_at', b.decided_at), ('sent_at', b.sent_at)) t(name, value)
    WHERE {is_out_of_range("value")}
    UNION ALL SELECT 'first number', b.first_seq::text WHERE b.first_seq NOT BETWEEN -{HIGHEST} AND {HIGHEST}) w(name, value)
WHERE outbox_newest(b.message_ids) >= %(first)s
    AND EXISTS (SELECT FROM unnest(b.message_ids) u(id) WHERE u.id >= %(first)s AND u.id < %(end)s)
"""


def find_unreadable(connection: psycopg.Connection[Any], span: Span) -> str | None:
    """Return a sentence about values of a day that cannot be archived. None: all can be."""
    query = " UNION ALL ".join(
        [FIND_UNREADABLE_MESSAGES, *(_find_unreadable_rows(frame, span) for frame in TIMED_FRAMES.values())]
    )
    rows = connection.execute(f"{query} LIMIT {MAX_VALUES_NAMED}", {"first": span.first_id, "end": span.end_id}).fetchall()
    names = ", ".join(text for (text,) in rows)
    return f"{names}: this value cannot be archived. Correct it; the next run archives the day" if names else None


def _find_unreadable_rows(frame: Frame, span: Span) -> str:
    message = next((column.sql for column in frame.columns if column.name == "message_id"), "''")
    times = [column.sql for column in frame.columns if column.kind == "time"]
    return " UNION ALL ".join(
        f"SELECT '{time} of message ' || coalesce({message}, '') || ' in outbox_{frame.name} is ' || {time} "
        f"FROM outbox_{frame.name} WHERE {frame.time} < '{span.end}' AND {is_out_of_range(time)}"
        for time in times
    )


DELETE = "DELETE FROM outbox_{name} WHERE {time} < '{end}'"

# Whether a message with an inbox row of the day is also deferred: it would be handled again if the inbox row were deleted.
HAS_DEFERRED = """
SELECT EXISTS (SELECT FROM outbox_deferred d JOIN outbox_inbox i ON i.message_id = d.message_id
    AND i.consumer_group = d.consumer_group WHERE i.handled_at < '{end}')
"""

# The request for the lock waits only briefly, because all sessions that need the table queue behind it meanwhile.
SHORT_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '100ms'"
ROW_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '10s'"
PARTITION_EXISTS = "SELECT to_regclass('{table}') IS NOT NULL"
LOCK_PARTITION = "LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"
COUNT_PARTITION = "SELECT count(*) FROM {table}"
DROP_PARTITION = "DROP TABLE {table}"


class DayChanged(PipelineError):
    """Raised when the day's rows in the database differ from those in the lake; nothing was deleted."""


class DayInUse(PipelineError):
    """Raised when a day cannot be dropped yet; nothing was deleted."""


def delete_day(connection: Connection, span: Span, commit: Commit, *, patience_seconds: float) -> None:
    """
    Drop a day's messages, and delete the rows of the other tables up to its end, in one transaction.

    Raises:
        DayChanged: rows were added, deleted or changed since they were archived.
        DayInUse: an unfinished batch refers to the day, other transactions lock it, or a handled message is still deferred.
    """
    _require_unchanged_messages(connection, span, commit)
    with connection.transaction():
        connection.execute(END_IDLE_TRANSACTION)
        connection.execute(ROW_LOCK_TIMEOUT)
        if connection.execute(HAS_DEFERRED.format(end=span.end)).fetchone() == (True,):
            raise DayInUse("messages that were handled and are still deferred, until outbox_relay or Celery's maintenance runs")
        for name, frame in TIMED_FRAMES.items():
            if name not in commit.frames:  # committed by an older version; the next day's commit includes these rows
                continue
            archived = commit.frames[name].rows
            deleted = _delete(connection, DELETE.format(name=name, time=frame.time, end=span.end))
            if deleted != archived:
                raise DayChanged(f"outbox_{name} has {deleted} rows from before {span.end}, the lake {archived}")
        drop(connection, span, commit, time.monotonic() + patience_seconds)
        records.mark(connection, records.DELETED, commit)
        failpoint("archive.in_delete")


def _delete(connection: Connection, statement: str) -> int:
    """Delete rows and return their number. Raises DayInUse if one of them is locked."""
    try:
        return connection.execute(statement).rowcount
    except errors.LockNotAvailable as error:
        raise DayInUse("open transactions") from error


def _require_unchanged_messages(connection: Connection, span: Span, commit: Commit) -> None:
    """Raise DayChanged if the messages differ from those in the lake. This takes no lock, so it runs before locks are taken."""
    if not _partition_exists(connection, span):
        return
    row = connection.execute(digest_query(MESSAGES, MESSAGES.query(span))).fetchone()
    archived = commit.frames[MESSAGES.name]
    if row != (archived.rows, archived.digest):
        raise DayChanged("its messages differ from those that were archived")


def drop(connection: Connection, span: Span, commit: Commit, deadline: float) -> None:
    """Drop the day's partition. If other transactions lock it, retry until the deadline, then raise DayInUse."""
    while True:
        try:
            with connection.transaction():
                return _try_to_drop(connection, span, commit)
        except (errors.LockNotAvailable, errors.DeadlockDetected) as error:
            if time.monotonic() >= deadline:
                raise DayInUse("open transactions") from error
            time.sleep(random.uniform(0.05, 0.2))  # noqa: S311  (so that queued sessions get their locks)


def _try_to_drop(connection: Connection, span: Span, commit: Commit) -> None:
    connection.execute(SHORT_LOCK_TIMEOUT)
    connection.execute(LOCK_PARTITIONS)
    if not _partition_exists(connection, span):  # dropped by an older version, or by hand
        return
    connection.execute(LOCK_PARTITION.format(table=span.table))
    if holder := find_holder(connection, span.first_id, span.end_id):
        raise DayInUse(holder)
    row = connection.execute(COUNT_PARTITION.format(table=span.table)).fetchone()
    if row != (commit.frames[MESSAGES.name].rows,):
        raise DayChanged("new messages came into it")
    connection.execute(DROP_PARTITION.format(table=span.table))


def _partition_exists(connection: Connection, span: Span) -> bool:
    return connection.execute(PARTITION_EXISTS.format(table=span.table)).fetchone() == (True,)


Log = Callable[[str], None]

MAX_COMMITS_PER_RUN = 2  # a day that changed meanwhile is archived again once; if it changes again, the next run archives it

# The id of the message with a given position in a day. Such ids are the bounds of parts with equal numbers of messages.
FIND_ID_AT_OFFSET = "SELECT id::text FROM outbox_message WHERE id >= %s AND id < %s ORDER BY id OFFSET %s LIMIT 1"

# The size in bytes of a day's largest body; PostgreSQL knows the sizes without reading the bodies.
LARGEST_BODY = "SELECT coalesce(max(octet_length(body)), 0) FROM outbox_message WHERE id >= %s AND id < %s"


class Writer(Protocol):
    """Writes frames as Parquet, and reads them back. `readers.SparkWriter` implements it."""

    def write(self, frame: Frame, queries: Sequence[str], snapshot: str, folder: Path, row_bytes: int) -> None: ...

    def verify(self, frame: Frame, files: Sequence[Path]) -> tuple[int, str]: ...


@dataclass
class ArchiveReport:
    """
    The result of a run.

    Args:
        days: archived day -> number of its messages.
        kept: day that is due, and still in the database -> reason.
        abandoned: the folders of interrupted attempts, which were removed.
        rows: the number of archived rows of all frames.
    """

    days: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    abandoned: list[str] = field(default_factory=list)
    rows: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {**asdict(self), "seconds": round(self.seconds, 2)}


@dataclass
class Archiver:
    """
    Archives the days of a database that are due. The caller holds the archive lock.

    Args:
        connection: the connection that holds the lock, in autocommit.
        open_writer: called when the first rows are to be written.
    """

    config: ArchiveConfig
    connection: Connection
    lake: Lake
    open_writer: Callable[[], Writer]
    log: Log = lambda text: None
    report: ArchiveReport = field(default_factory=ArchiveReport)

    @cached_property
    def writer(self) -> Writer:
        return self.open_writer()

    def run(self) -> ArchiveReport:
        """
        Archive each day that is due, or report why it is kept.

        Raises:
            LakeError: the lake cannot be used. Only rows that are committed in it were deleted.
            HistoryError: the database cannot be read.
        """
        started = time.monotonic()
        self.lake.require_writable()
        source, committed = records.source(self.connection), records.committed(self.connection)
        require_own_lake(self.lake, self.lake.committed(), source, committed)
        for day in records.days(self.connection, self.config.before):
            self._archive(Span(day))
        self.report.seconds = time.monotonic() - started
        return self.report

    def _archive(self, span: Span) -> None:
        for _ in range(MAX_COMMITS_PER_RUN):
            commit = self._find_commit(span) or self._commit(span)
            if commit is None:
                return
            try:
                self._delete(span, commit)
                return
            except DayInUse as error:
                self._keep(span, str(error))
                return
            except DayChanged as error:
                self._keep(span, f"it changed while it was archived: {error}")
                records.mark(self.connection, records.CHANGED, commit)

    def _find_commit(self, span: Span) -> Commit | None:
        """Return the commit of an earlier run that ended before it had deleted the day. None: the day has to be written."""
        state, attempt = records.read(self.connection, span.day)
        if state in ("", "changed", "deleted"):
            return None
        for commit in self.lake.committed(str(span.day)):
            if commit.attempt == attempt:
                self.log(f"{span.day}: already committed, continuing")
                self.lake.require_files(commit)
                return commit
        return None

    def _commit(self, span: Span) -> Commit | None:
        """Plan, write, verify and commit a day. None: it has unfinished messages, or a value that cannot be archived."""
        state, last = records.read(self.connection, span.day)
        attempt = 1 + max([last, *self._attempts(span.day)])
        with exported_snapshot(self.config.pipeline.outbox.url) as (reading, snapshot):
            reason = find_holder(reading, span.first_id, span.end_id) or find_unreadable(reading, span)
            if reason:
                self._keep(span, reason)
                return None
            if state == "planned":
                self._remove_abandoned(span, last)
            reading.execute("SET LOCAL jit = off")
            self.log(f"{span.day}: counting")
            planned = {}
            for name, frame in FRAMES.items():
                [row] = reading.execute(digest_query(frame, frame.query(span))).fetchall()
                planned[name] = WrittenFrame(*row)
            rows, digest = planned[MESSAGES.name].rows, planned[MESSAGES.name].digest
            records.plan(self.connection, span.day, attempt, rows, digest)
            failpoint("archive.after_plan")
            other_rows = sum(frame.rows for frame in planned.values()) - rows
            self.log(f"{span.day}: writing {rows} messages and {other_rows} rows of other tables")
            [(largest,)] = reading.execute(LARGEST_BODY, [span.first_id, span.end_id]).fetchall()
            id_ranges = _id_ranges(reading, span, rows, self.config.rows_per_part)
            for name, frame in FRAMES.items():
                if planned[name].rows:
                    queries = [frame.query(span, *bounds) for bounds in id_ranges] if frame.id else [frame.query(span)]
                    self.writer.write(frame, queries, snapshot, self._folder(span, name, attempt), largest)
        failpoint("archive.after_write")
        self.log(f"{span.day}: reading back")
        frames = {name: self._verify(span, FRAMES[name], attempt, planned[name]) for name in FRAMES}
        failpoint("archive.after_verify")
        [(now,)] = self.connection.execute(NOW).fetchall()
        commit = Commit(str(span.day), attempt, records.source(self.connection), frames, now.isoformat())
        self.lake.commit(commit)
        failpoint("archive.after_commit")
        return commit

    def _verify(self, span: Span, frame: Frame, attempt: int, planned: WrittenFrame) -> WrittenFrame:
        if not planned.rows:
            return planned
        folder = self._folder(span, frame.name, attempt)
        files = sorted(folder.glob("*.parquet"))
        rows, digest = self.writer.verify(frame, files) if files else (0, "0")
        if (rows, digest) != (planned.rows, planned.digest):
            raise LakeError(
                f"The files of {frame.name} in {folder} differ from the rows that were read: {rows} rows instead of "
                f"{planned.rows}, or other values. Nothing was committed or deleted. Check the disk, then archive again."
            )
        sizes = {str(file.relative_to(self.lake.root)): file.stat().st_size for file in files}
        return WrittenFrame(rows, digest, sizes)

    def _delete(self, span: Span, commit: Commit) -> None:
        records.mark(self.connection, records.COMMITTED, commit)
        failpoint("archive.before_delete")
        self.log(f"{span.day}: deleting")
        delete_day(self.connection, span, commit, patience_seconds=self.config.patience_seconds)
        self.report.days[str(span.day)] = commit.frames[MESSAGES.name].rows
        self.report.kept.pop(str(span.day), None)
        self.report.rows += sum(written.rows for written in commit.frames.values())

    def _keep(self, span: Span, reason: str) -> None:
        self.log(f"{span.day}: kept: {reason}")
        self.report.kept[str(span.day)] = reason

    def _folder(self, span: Span, frame: str, attempt: int) -> Path:
        return self.lake.root / frame / str(span.day) / f"a{attempt}"

    def _attempts(self, day: date) -> list[int]:
        """Return the attempts that have a manifest or a folder in the lake, so that a new attempt overwrites none of them."""
        folders = [path.name for frame in FRAMES for path in (self.lake.root / frame / str(day)).glob("a*")]
        return [
            *(commit.attempt for commit in self.lake.committed(str(day))),
            *(int(name[1:]) for name in folders if name[1:].isdigit()),
        ]

    def _remove_abandoned(self, span: Span, attempt: int) -> None:
        """Remove the folders of an interrupted attempt. Others stay, since they may be committed and have lost their manifest."""
        for folder in filter(Path.exists, sorted(self._folder(span, frame, attempt) for frame in FRAMES)):
            self.log(f"{span.day}: removing {folder}, the incomplete archive of an archiver that was stopped")
            self.report.abandoned.append(str(folder))
            shutil.rmtree(folder, ignore_errors=True)


def archive_due(config: ArchiveConfig, log: Log) -> ArchiveReport:
    """Archive the days that are due, while holding the database's archive lock. Raises PipelineError."""
    try:
        with ExitStack() as stack, records.archive_lock(config.pipeline.outbox.url) as connection:

            def open_writer() -> Writer:
                # Imported only here, so that a run in which nothing is due needs neither PySpark nor Java.
                from outbox.pipeline.spark.readers import SparkWriter

                return stack.enter_context(closing(SparkWriter(config, log)))

            return Archiver(config, connection, Lake(Path(config.lake)), open_writer, log).run()
    except psycopg.Error as error:
        raise PipelineError(f"The database failed: {str(error).strip()}. The next run continues from there.") from error


def _id_ranges(reading: Connection, span: Span, rows: int, per_part: int) -> list[tuple[str | None, str | None]]:
    """
    Return ranges of message ids with about `per_part` messages of a day each.

    The first one has no lower bound and the last one no upper bound, because rows of a day may be about messages of other days.
    """
    rows_at_bounds = [
        reading.execute(FIND_ID_AT_OFFSET, [span.first_id, span.end_id, offset]).fetchone()
        for offset in range(per_part, rows, per_part)
    ]
    ids = [row[0] for row in rows_at_bounds if row]
    return list(zip([None, *ids], [*ids, None], strict=True))

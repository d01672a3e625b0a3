"""Archive all days that are due, oldest first, and finish interrupted ones."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outbox.database.retention_holds import find_holder
from outbox.failpoints import failpoint
from outbox.pipeline.spark.archive import records
from outbox.pipeline.spark.archive.config import ArchiveConfig
from outbox.pipeline.spark.archive.delete import DayChanged, DayInUse, delete_day
from outbox.pipeline.spark.archive.unreadable import find_unreadable
from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.commit import Commit, Written
from outbox.pipeline.spark.lake.completeness import require_own_lake
from outbox.pipeline.spark.lake.frames import FRAMES, MESSAGES, Frame, Span, digest_query
from outbox.pipeline.spark.lake.manifest import Lake
from outbox.pipeline.spark.sources.snapshot import exported_snapshot

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]

Log = Callable[[str], None]

ROUNDS = 2  # a day that changed while it was archived is archived again once, and then left for the next run

# The ids at which a day is split into parts of equal size.
CUT = "SELECT id::text FROM outbox_message WHERE id >= %s AND id < %s ORDER BY id OFFSET %s LIMIT 1"

# The size of a day's largest body; PostgreSQL knows it without reading the body.
LARGEST = "SELECT coalesce(max(octet_length(body)), 0) FROM outbox_message WHERE id >= %s AND id < %s"


class Writer(Protocol):
    """Writes frames as Parquet, and reads them back. `SparkWriter` is one."""

    def write(self, frame: Frame, queries: Sequence[str], snapshot: str, folder: Path, row_bytes: int) -> None: ...

    def verify(self, frame: Frame, files: Sequence[Path]) -> tuple[int, str]: ...


@dataclass
class ArchiveReport:
    """
    The result of a run.

    Args:
        days: archived day -> number of messages.
        kept: day that is due, but still in the database -> reason.
        abandoned: removed folders of interrupted attempts.
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
    """Archives a database's days; the caller holds the archive lock."""

    config: ArchiveConfig
    connection: Connection
    lake: Lake
    writer: Writer
    log: Log = lambda text: None
    done: ArchiveReport = field(default_factory=ArchiveReport)

    def run(self) -> ArchiveReport:
        """
        Archive each day that is due, or report why it is kept.

        Raises:
            LakeError: the lake cannot be used. Only rows that are committed in it were deleted.
            HistoryError: the database cannot be read.
        """
        started = time.monotonic()
        self.lake.require_writable()
        ours, committed = records.source(self.connection), records.committed(self.connection)
        require_own_lake(self.lake, self.lake.committed(), ours, committed)
        for day in records.days(self.connection, self.config.before):
            self._archive(Span(day))
        self.done.seconds = time.monotonic() - started
        return self.done

    def _archive(self, span: Span) -> None:
        for _ in range(ROUNDS):
            commit = self._committed(span) or self._commit(span)
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
                records.mark_changed(self.connection, commit)

    def _committed(self, span: Span) -> Commit | None:
        """Return the commit of an earlier run that did not delete the day."""
        record = records.read(self.connection, span.day)
        if record is None or record.state in ("changed", "deleted"):
            return None
        for commit in self._commits(span.day):
            if commit.attempt == record.attempt:
                self.log(f"{span.day}: already committed, continuing")
                self.lake.require_files(commit)
                return commit
        return None

    def _commit(self, span: Span) -> Commit | None:
        """Plan, write, verify and commit a day. None: it is not finished, or cannot be archived."""
        record = records.read(self.connection, span.day)
        attempt = 1 + max([record.attempt if record else 0, *self._attempts(span.day)])
        with exported_snapshot(self.config.pipeline.outbox.url) as (reading, snapshot):
            reason = find_holder(reading, span.first_id, span.end_id) or find_unreadable(reading, span)
            if reason:
                self._keep(span, reason)
                return None
            if record and record.state == "planned":
                self._remove_abandoned(span, record.attempt)
            reading.execute("SET LOCAL jit = off")
            self.log(f"{span.day}: counting")
            planned = {name: _planned(reading, frame, span) for name, frame in FRAMES.items()}
            rows, digest = planned[MESSAGES.name].rows, planned[MESSAGES.name].digest
            records.plan(self.connection, span.day, attempt, rows, digest)
            failpoint("archive.after_plan")
            others = sum(one.rows for one in planned.values()) - rows
            self.log(f"{span.day}: writing {rows} messages and {others} rows of other tables")
            largest = reading.execute(LARGEST, [span.first_id, span.end_id]).fetchone() or (0,)
            cuts = _cuts(reading, span, rows, self.config.rows_per_part)
            for name, frame in FRAMES.items():
                if planned[name].rows:
                    queries = [frame.query(span, *part) for part in cuts] if frame.id else [frame.query(span)]
                    self.writer.write(frame, queries, snapshot, self._folder(span, name, attempt), *largest)
        failpoint("archive.after_write")
        self.log(f"{span.day}: reading back")
        frames = {name: self._verified(span, FRAMES[name], attempt, planned[name]) for name in FRAMES}
        failpoint("archive.after_verify")
        source, now = records.source(self.connection), records.now(self.connection)
        commit = Commit(str(span.day), attempt, source, frames, now.isoformat())
        self.lake.commit(commit)
        failpoint("archive.after_commit")
        return commit

    def _verified(self, span: Span, frame: Frame, attempt: int, planned: Written) -> Written:
        if not planned.rows:
            return planned
        folder = self._folder(span, frame.name, attempt)
        files = sorted(folder.glob("*.parquet"))
        rows, digest = self.writer.verify(frame, files) if files else (0, "0")
        if (rows, digest) != (planned.rows, planned.digest):
            raise LakeError(
                f"The files of {frame.name} in {folder} differ from what was read: {rows} rows instead of {planned.rows}, or "
                "other values. Nothing was committed or deleted. Check the disk, then archive again."
            )
        sizes = {str(file.relative_to(self.lake.root)): file.stat().st_size for file in files}
        return Written(rows, digest, sizes)

    def _delete(self, span: Span, commit: Commit) -> None:
        records.mark_committed(self.connection, commit, commit.to_json())
        failpoint("archive.before_delete")
        self.log(f"{span.day}: deleting")
        delete_day(self.connection, span, commit, patience_seconds=self.config.patience_seconds)
        self.done.days[str(span.day)] = commit.frames[MESSAGES.name].rows
        self.done.kept.pop(str(span.day), None)
        self.done.rows += sum(written.rows for written in commit.frames.values())

    def _keep(self, span: Span, reason: str) -> None:
        self.log(f"{span.day}: kept: {reason}")
        self.done.kept[str(span.day)] = reason

    def _commits(self, day: date) -> list[Commit]:
        return self.lake.committed(str(day))

    def _folder(self, span: Span, frame: str, attempt: int) -> Path:
        return self.lake.root / frame / str(span.day) / f"a{attempt}"

    def _attempts(self, day: date) -> list[int]:
        """Return the attempts that have a manifest or a folder in the lake. They are never overwritten."""
        folders = [path.name for frame in FRAMES for path in (self.lake.root / frame / str(day)).glob("a*")]
        return [*(commit.attempt for commit in self._commits(day)), *(int(name[1:]) for name in folders if name[1:].isdigit())]

    def _remove_abandoned(self, span: Span, attempt: int) -> None:
        """Remove the folders of an interrupted attempt. Others are kept: they may be committed, with a lost manifest."""
        for folder in filter(Path.exists, sorted(self._folder(span, frame, attempt) for frame in FRAMES)):
            self.log(f"{span.day}: removing {folder}, the incomplete archive of an archiver that was stopped")
            self.done.abandoned.append(str(folder))
            shutil.rmtree(folder, ignore_errors=True)


def _planned(reading: Connection, frame: Frame, span: Span) -> Written:
    [row] = reading.execute(digest_query(frame, frame.query(span))).fetchall()
    return Written(*row)


def _cuts(reading: Connection, span: Span, rows: int, per_part: int) -> list[tuple[str | None, str | None]]:
    """Split a day's ids into ranges of about `per_part` rows. The first and last are open: some rows are about other days."""
    at = [reading.execute(CUT, [span.first_id, span.end_id, offset]).fetchone() for offset in range(per_part, rows, per_part)]
    ids = [row[0] for row in at if row]
    return list(zip([None, *ids], [*ids, None], strict=True))

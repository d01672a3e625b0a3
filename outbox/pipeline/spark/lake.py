"""
The lake, a folder of Parquet files with the rows of archived days: the queries that select a day's rows, the manifests that say
which files are committed, and the look-up of a message.

    Frame.query(Span(2026-11-01)) -> one SELECT for the messages, inbox rows or other rows of that day

    <lake>/messages/2026-11-01/a1/part-….parquet   files of attempt 1
    <lake>/_manifests/2026-11-01.a1.json           {"source": …, "frames": {"messages": {"rows": 7, "digest": …, "files": …}}}

PostgreSQL and Spark calculate the same hash of a row. So if the database and the files have the same number of rows and the same
sum of hashes, their rows are equal.

Each attempt writes its files to a separate folder, and then commits them with a manifest. The manifest is written to a temporary
file, and published with link(2), which never replaces a file. The files of a writer that died have no manifest, so they are never
read.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from outbox.pipeline.spark import AlreadyCommitted, LakeError


def first_id_at(time: datetime) -> str:
    """Return the smallest uuid7 of that time, as text."""
    return str(UUID(int=int(time.timestamp() * 1000) << 80))


HASH_DIGITS = 15  # hexadecimal digits, 60 bits, so that a hash is a positive bigint in PostgreSQL and in Spark
NULL = "\\N"
SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Span:
    """A UTC day, and its bounds as message ids and as times. The end is exclusive."""

    day: date

    @property
    def first_id(self) -> str:
        return first_id_at(self._midnight(0))

    @property
    def end_id(self) -> str:
        return first_id_at(self._midnight(1))

    @property
    def end(self) -> str:
        return self._midnight(1).isoformat()

    @property
    def table(self) -> str:
        """The day's partition of the message table."""
        return f"outbox_message_{self.day:%Y%m%d}"

    def _midnight(self, days: int) -> datetime:
        return datetime(self.day.year, self.day.month, self.day.day, tzinfo=UTC) + timedelta(days=days)


@dataclass(frozen=True)
class Column:
    """A column of a frame; `sql` is the expression that selects it."""

    name: str
    sql: str
    kind: Literal["text", "int", "time", "bytes"] = "text"


@dataclass(frozen=True)
class Frame:
    """
    A kind of rows that is archived, and the query that selects them.

    Args:
        from_clause: the FROM clause, in which `{newest}` and `{position}` are replaced by conditions on message ids.
        id: the SQL expression of the message id, by which rows are read in parts and sorted; empty: they are read in one part.
        time: the column whose time decides to which day a row belongs; empty: the time in the message id does.
        key: the columns that identify a row in the table.
    """

    name: str
    columns: tuple[Column, ...]
    from_clause: str
    key: tuple[str, ...]
    id: str = ""
    time: str = ""

    @property
    def identity(self) -> tuple[str, ...]:
        """
        The columns that identify a row forever: the key and the time, since keys may be used again after a delete or a restore.
        """
        return (*self.key, self.time) if self.time else self.key

    def query(self, span: Span | None, low: str | None = None, high: str | None = None) -> str:
        """
        Return a query for the rows of a day, or for all rows.

        Args:
            span: the day; a frame with a time column also has all earlier rows in it. None: all rows.
            low, high: only message ids from `low` up to, but not including, `high`; None: no further bound.
        """
        if span is not None and not self.time:
            low, high = low or span.first_id, high or span.end_id
        where = ["true"] if span is None or not self.time else [f"{self.time} < '{span.end}'"]
        rows = self.from_clause.format(
            position=_bounds("u.id", low, high), newest=_bounds("outbox_newest(b.message_ids)", low, None)
        )
        columns = ", ".join(f"{column.sql} AS {column.name}" for column in self.columns)
        where += [_bounds(self.id, low, high)] if self.id else []
        return f"SELECT {columns} {rows} WHERE {' AND '.join(where)}"


def _bounds(column: str, low: str | None, high: str | None) -> str:
    parts = [f"{column} >= '{low}'" if low else "", f"{column} < '{high}'" if high else ""]
    return " AND ".join(filter(None, parts)) or "true"


def digest_query(frame: Frame, query: str) -> str:
    """Return a query for the number of rows and the sum of their hashes, which is the digest."""
    parts = []
    for column in frame.columns:
        text = {
            "text": f"f.{column.name}",
            "int": f"f.{column.name}::text",
            "time": f"round(extract(epoch FROM f.{column.name}) * 1000000)::bigint::text",
            "bytes": f"md5(f.{column.name})",
        }[column.kind]
        parts.append(f"coalesce({text}, '{NULL}')")
    row = f"('x' || left(md5(concat_ws('{SEPARATOR}', {', '.join(parts)})), {HASH_DIGITS}))::bit({4 * HASH_DIGITS})::bigint"
    return f"SELECT count(*), coalesce(sum({row}), 0)::text FROM ({query}) f"  # noqa: S608


def _text(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, name) for name in names)


# Messages and their states. On a finished day, a row changes only if an operator sends a dead message again.
# Topic 0 marks a tombstone, which a check-back writes in place of a message. If several batches contain a message, the newest one
# is valid.
MESSAGES = Frame(
    "messages",
    (
        Column("message_id", "m.id::text"),
        Column("topic", "coalesce(t.name, '')"),
        *(Column(name, f"m.{name}") for name in ("key", "headers", "about")),
        Column("body", "m.body", "bytes"),
        Column("created_at", "m.created_at", "time"),
        Column("source", "s.id"),
        Column(
            "state",
            """CASE WHEN m.topic_id = 0 THEN 'tombstone'
            WHEN p.state = 0 THEN CASE p.failures WHEN 0 THEN 'released' ELSE 'retrying' END
            WHEN p.state IS NOT NULL THEN ('{claimed,prepared,sent,dead,discarded}'::text[])[p.state]
            WHEN EXISTS (SELECT FROM outbox_ticket k WHERE k.message_id = m.id) THEN 'waiting'
            WHEN EXISTS (SELECT FROM outbox_delayed d WHERE d.message_id = m.id) THEN 'delayed' ELSE 'lost' END""",
        ),
        *(Column(name, f"p.{name}", "int") for name in ("batch_id", "position", "lane", "number", "attempt", "failures")),
        *(Column(name, f"p.{name}", "time") for name in ("claimed_at", "decided_at", "sent_at")),
        Column("last_error", "p.last_error"),
    ),
    """FROM outbox_message m CROSS JOIN outbox_source s LEFT JOIN outbox_topic t ON t.id = m.topic_id LEFT JOIN (
        SELECT DISTINCT ON (u.id) u.id, b.id AS batch_id, u.position, b.lane, b.first_seq + u.position - 1 AS number, b.state,
            b.attempt, b.failures, b.claimed_at, b.decided_at, b.sent_at, b.last_error
        FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) WITH ORDINALITY u(id, position)
        WHERE {newest} AND {position} AND u.position::smallint <> ALL (b.split) ORDER BY u.id, b.id DESC
    ) p ON p.id = m.id""",
    ("message_id",),
    id="m.id",
)

INBOX = Frame(
    "inbox",
    (
        *_text("consumer_group", "idempotency_key"),
        Column("message_id", "message_id::text"),
        *_text("source", "topic"),
        *(Column(name, name, "int") for name in ("lane", "number", "delivery_count")),
        Column("handled_at", "handled_at", "time"),
    ),
    "FROM outbox_inbox",
    ("consumer_group", "idempotency_key"),
    id="message_id",
    time="handled_at",
)

FAILED_DELIVERY = Frame(
    "failed_delivery",
    (
        Column("id", "id", "int"),
        Column("message_id", "message_id::text"),
        *_text("consumer_group", "source", "topic", "outcome", "fingerprint", "error", "traceback"),
        *(Column(name, name, "int") for name in ("delivery_count", "lane", "number")),
        Column("failed_at", "failed_at", "time"),
    ),
    "FROM outbox_failed_delivery",
    ("id",),
    id="message_id",
    time="failed_at",
)

DUPLICATE = Frame(
    "duplicate",
    (
        Column("id", "id", "int"),
        Column("message_id", "message_id::text"),
        *_text("consumer_group", "topic"),
        Column("delivery_count", "delivery_count", "int"),
        Column("dropped_at", "dropped_at", "time"),
    ),
    "FROM outbox_duplicate",
    ("id",),
    id="message_id",
    time="dropped_at",
)

# Attempts to send a batch that failed; the values in `message_ids` are separated by spaces.
FAILED_SEND = Frame(
    "failed_send",
    (
        *(Column(name, name, "int") for name in ("id", "batch_id", "attempt")),
        Column("message_ids", "array_to_string(message_ids, ' ')"),
        *_text("verdict", "reason"),
        Column("failed_at", "failed_at", "time"),
    ),
    "FROM outbox_failed_send",
    ("id",),
    time="failed_at",
)

OPERATOR_ACT = Frame(
    "operator_act",
    (
        Column("id", "id", "int"),
        Column("message_id", "message_id::text"),
        *_text("act", "topic", "consumer_group", "fingerprint", "reason", "acted_by"),
        *(Column(name, name, "int") for name in ("delivery_count", "batch_id", "attempt")),
        Column("acted_at", "acted_at", "time"),
    ),
    "FROM outbox_operator_act",
    ("id",),
    id="message_id",
    time="acted_at",
)

CHECK_BACK = Frame(
    "check_back",
    (
        Column("id", "id", "int"),
        *_text("message_id", "request_id", "asked_by", "topic", "half_id", "token", "answer", "reason", "about"),
        Column("asked", "asked", "int"),
        Column("milliseconds", "milliseconds::text"),
        Column("answered_at", "answered_at", "time"),
    ),
    "FROM outbox_check_back",
    ("id",),
    time="answered_at",
)

# Messages that the recorder has received, with their positions (queue and pos) at the broker. A position may be recorded again
# after its row was deleted from the table; `archived.drop_repeated_rows` keeps one row. Commits of older versions lack this
# frame.
RECORDED = Frame(
    "recorded",
    (
        Column("id", "id", "int"),
        Column("message_id", "message_id::text"),
        *_text("topic", "source", "key", "tag", "queue"),
        *(Column(name, name, "int") for name in ("lane", "number", "pos", "delivery_count")),
        *(Column(name, name, "time") for name in ("stored_at", "recorded_at")),
    ),
    "FROM outbox_recorded",
    ("id",),
    id="message_id",
    time="recorded_at",
)

FRAMES = {
    frame.name: frame for frame in (MESSAGES, INBOX, FAILED_DELIVERY, DUPLICATE, FAILED_SEND, OPERATOR_ACT, CHECK_BACK, RECORDED)
}
TIMED_FRAMES = {name: frame for name, frame in FRAMES.items() if frame.time}


@dataclass(frozen=True)
class WrittenFrame:
    """
    One frame of a day as it was written to the lake.

    Args:
        digest: the sum of the rows' hashes.
        files: path relative to the lake -> size in bytes.
    """

    rows: int
    digest: str
    files: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """
    The committed files of a day. A day has several commits if its rows in the database changed after the first one.

    Args:
        day: the UTC day, as `2026-11-01`.
        attempt: identifies the commit among those of its day. If several contain a row, that of the highest attempt is valid.
        source: the source id of the database that was archived.
        written_at: when the commit was made, by the database's clock.
    """

    day: str
    attempt: int
    source: str
    frames: dict[str, WrittenFrame]
    written_at: str = ""

    @property
    def name(self) -> str:
        return f"{self.day}.a{self.attempt}"

    def to_json(self) -> str:
        """Return the content of the manifest."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Commit:
        """Return the commit of a manifest. Raises ValueError, TypeError or KeyError if it is not one."""
        raw = json.loads(text)
        raw["frames"] = {name: WrittenFrame(**entry) for name, entry in raw["frames"].items()}
        return cls(**raw)


MANIFESTS = "_manifests"


@dataclass
class Lake:
    """A lake in a local or mounted folder, on a file system that supports hard links. The folder need not exist yet."""

    root: Path

    def require_writable(self) -> None:
        """Raise LakeError unless the lake is writable."""
        try:
            self._manifests.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._manifests, prefix=".try-") as file:
                os.link(file.name, f"{file.name}.link")
                Path(f"{file.name}.link").unlink()
        except OSError as error:
            raise LakeError(
                f"The lake in {self.root} cannot be written: {error.strerror}. Allow the process that archives to write there, "
                "on a file system with hard links."
            ) from error

    def commit(self, commit: Commit) -> None:
        """
        Commit files that are already in the lake, by publishing their manifest.

        Raises:
            AlreadyCommitted: the lake has a manifest of this day and attempt.
            LakeError: a file or the manifest cannot be written.
        """
        try:
            self._sync_files(commit)
            self._manifests.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._manifests, prefix=f".{commit.name}-", delete=False) as file:
                file.write(commit.to_json())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(file.name, self._manifests / f"{commit.name}.json")
            finally:
                Path(file.name).unlink()
            _sync_folder(self._manifests)
        except FileExistsError as error:
            raise AlreadyCommitted(f"The lake in {self.root} already has {commit.name}.") from error
        except OSError as error:
            raise LakeError(f"{commit.name} cannot be committed to the lake in {self.root}: {error}.") from error

    def committed(self, day: str = "") -> list[Commit]:
        """Return all commits, or those of one day, the oldest day first. Raises LakeError if a manifest cannot be read."""
        try:
            names = [entry.name for entry in os.scandir(self._manifests) if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LakeError(f"The lake in {self.root} cannot be read: {error.strerror}.") from error
        manifests = [self._read(self._manifests / name) for name in names if name.startswith(day)]
        return sorted(manifests, key=lambda commit: (commit.day, commit.attempt))

    def require_files(self, commit: Commit, *frames: str) -> None:
        """Raise LakeError unless all files of a commit, or of the given frames of it, exist and have the size in the manifest."""
        for name, written in commit.frames.items():
            for file, size in written.files.items() if not frames or name in frames else ():
                try:
                    actual_size = (self.root / file).stat().st_size
                except OSError as error:
                    raise LakeError(
                        f"The file {file} of {commit.name} in the lake in {self.root} cannot be read: {error.strerror}. "
                        "Restore it from a backup of the lake."
                    ) from error
                if actual_size != size:
                    raise LakeError(
                        f"The file {file} of {commit.name} in {self.root} has {actual_size} bytes instead of {size}. "
                        "Restore it from a backup of the lake."
                    )

    def _read(self, path: Path) -> Commit:
        try:
            return Commit.from_json(path.read_text())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LakeError(
                f"The manifest {path} cannot be read: {type(error).__name__}: {error}. It was damaged after it was written. "
                "Restore it from a backup of the lake."
            ) from error

    @property
    def _manifests(self) -> Path:
        return self.root / MANIFESTS

    def _sync_files(self, commit: Commit) -> None:
        """Flush the files and their folders to disk, so that a manifest never names files that a power failure removes."""
        files = [self.root / file for written in commit.frames.values() for file in written.files]
        for file in files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        folders = {folder for file in files for folder in file.parents if folder.is_relative_to(self.root)}
        for folder in sorted(folders, reverse=True):
            _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems neither support nor need the fsync of a folder
            raise
    finally:
        os.close(descriptor)


DAY = timedelta(days=1)

# The tables that all versions archive. They are pruned together, so it suffices that one of them is in a commit.
ALWAYS_ARCHIVED = frozenset(TIMED_FRAMES) - {RECORDED.name}


def require_own_lake(lake: Lake, commits: Iterable[Commit], source: str, committed: Mapping[str, int]) -> None:
    """
    Raise LakeError if the lake belongs to another database, or lacks a day that the database has recorded as archived.

    Args:
        source: the source id of the database.
        committed: the recorded days -> their attempt.
    """
    commits = list(commits)
    if others := {commit.source for commit in commits} - {source}:
        raise LakeError(f"The lake in {lake.root} belongs to database {sorted(others)[0]}; this one is {source}.")
    in_lake = {(commit.day, commit.attempt) for commit in commits}
    if missing := sorted(set(committed.items()) - in_lake):
        raise LakeError(
            f"The lake in {lake.root} lacks {missing[0][0]}.a{missing[0][1]}, which was archived there. Check that the right "
            "folder is mounted. If only the manifest is lost, restore it from outbox_archived_day in the database."
        )


def complete_since(
    commits: Sequence[Commit],
    days: Iterable[date],
    *,
    installed_at: datetime,
    retention: timedelta,
    database_since: datetime,
    frames: Collection[str] = ALWAYS_ARCHIVED,
) -> datetime | None:
    """
    Return the time since which database and lake together have all rows. None: they have all rows since the installation.

    Once there is an archive, rows are deleted only after they are archived. Rows from the time before the archive may have been
    pruned. A day that is neither in the database nor in the lake was pruned while there was no archive, so the history is
    complete only from the first commit of a later day on.

    Args:
        commits: all commits, oldest first.
        days: the days that are in the database or in the lake.
        installed_at: when the outbox was installed in the database.
        retention: the age at which rows are pruned without an archive.
        database_since: the time since which the database alone has all rows.
        frames: the names of the frames in question. Commits without any of them were made by an older version, and do not count.
    """
    with_frames = [commit for commit in commits if any(name in commit.frames for name in frames)]
    installed_on, known_days = installed_at.astimezone(UTC).date(), set(days)
    first_day = max(min(known_days, default=installed_on), installed_on)
    day_numbers = range((database_since.astimezone(UTC).date() - first_day).days)
    missing_days = [day for day in (first_day + n * DAY for n in day_numbers) if day not in known_days]
    commits_after = (commit for commit in with_frames if not missing_days or commit.day > str(missing_days[-1]))
    archived_since = min(map(_written_at, commits_after), default=database_since)
    has_all_days = bool(with_frames) and not missing_days and first_day <= installed_on and with_frames[0] == commits[0]
    if has_all_days and (archived_since - retention < installed_at or _begins_unpruned(with_frames, frames)):
        return None
    return min(archived_since, database_since)


def _begins_unpruned(commits: Iterable[Commit], frames: Collection[str]) -> bool:
    """Return whether these frames have rows from the first commits on, so that pruning had deleted none before the archive."""
    for commit in commits:
        if any(commit.frames[name].rows for name in frames if name in commit.frames):
            return True
        if commit.frames[MESSAGES.name].rows:
            return False
    return False


def _written_at(commit: Commit) -> datetime:
    try:
        return datetime.fromisoformat(commit.written_at)
    except ValueError as error:
        raise LakeError(f"The manifest {commit.name} does not say when it was written. Restore it from a backup.") from error


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class ArchivedMessage:
    """
    A message in the lake.

    Args:
        message: the message's columns, as in `MESSAGES`.
        commit: the name of the commit that contains it.
        handled: its inbox rows in order of time, with the columns of `INBOX`.
    """

    message: dict[str, Any]
    commit: str
    handled: list[dict[str, Any]] = field(default_factory=list)


def day_of(message_id: UUID) -> date:
    """Return the UTC day in a uuid7; the last possible day if the id contains no valid time."""
    try:
        return (EPOCH + timedelta(milliseconds=message_id.int >> 80)).date()
    except OverflowError:
        return date.max


def find_message(lake: Lake, message_id: UUID) -> ArchivedMessage | None:
    """
    Return the message with this id. None: the lake does not have it.

    Its inbox rows are searched only in the commits of the day in its id, and of the next day.

    Raises:
        LakeError: the lake or a committed file cannot be read; or pyarrow is missing.
    """
    day = day_of(message_id)
    commits = lake.committed(str(day))
    for commit in reversed(commits):  # the latest attempt first
        for row in _rows(lake, commit, "messages", message_id):
            commits_of_both_days = [*commits, *lake.committed(str(day + timedelta(days=1)))]
            inbox = (row for near in commits_of_both_days for row in _rows(lake, near, "inbox", message_id))
            handled = {tuple(row[name] for name in INBOX.identity): row for row in inbox}  # several commits may contain a row
            return ArchivedMessage(row, commit.name, sorted(handled.values(), key=lambda row: row["handled_at"]))
    return None


def _rows(lake: Lake, commit: Commit, frame: str, message_id: UUID) -> Iterator[dict[str, Any]]:
    """Yield the rows of one message in a commit, from the row groups that may contain it."""
    try:
        # Imported only here, because the admin imports this module and works without pyarrow, which is in the extra `lake`.
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise LakeError('pyarrow is missing: pip install "django-transactional-outbox[lake]"') from error
    lake.require_files(commit, frame)
    filters = [("message_id", "=", str(message_id))]
    for file in commit.frames[frame].files:
        try:
            table = parquet.read_table(lake.root / file, filters=filters, use_threads=False, page_checksum_verification=True)
            yield from table.to_pylist()
        except (OSError, ArrowException) as error:
            raise LakeError(f"The file {file} of {commit.name} in {lake.root} cannot be read: {error}") from error

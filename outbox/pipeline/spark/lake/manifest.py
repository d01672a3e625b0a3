"""
The manifests of a lake: which files are committed, whose they are, and from when on lake and database together are complete.

    <lake>/messages/2026-11-01/a1/part-….parquet   files of attempt 1
    <lake>/_manifests/2026-11-01.a1.json           {"source": …, "frames": {"messages": {"rows": 7, "digest": …, "files": …}}}

Files are written first, each attempt in its own folder, and committed by their manifest: it is written to a temporary file, and
published with link(2), which never replaces a file. A writer that dies leaves files that are never read.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from outbox.pipeline.spark.errors import AlreadyCommitted, LakeError
from outbox.pipeline.spark.lake.frames import MESSAGES, RECORDED, TIMED_FRAMES


@dataclass(frozen=True)
class Written:
    """
    One frame of a day in the lake.

    Args:
        files: path relative to the lake -> size in bytes.
        digest: the sum of the rows' hashes; PostgreSQL calculates the same for the same rows.
    """

    rows: int
    digest: str
    files: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """
    A commit of a day. A day has several commits if rows came into it after the first.

    Args:
        day: UTC, `2026-11-01`.
        attempt: identifies the commit among those of its day. If several contain a row, the highest attempt is valid.
        source: the source id of its database.
    """

    day: str
    attempt: int
    source: str
    frames: dict[str, Written]
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
        raw["frames"] = {name: Written(**entry) for name, entry in raw["frames"].items()}
        return cls(**raw)


MANIFESTS = "_manifests"


@dataclass
class Lake:
    """A lake in a local or mounted folder, on a file system with hard links. The folder need not exist yet."""

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
        """Write the manifest of a commit. Raises AlreadyCommitted, LakeError."""
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
        """Return all commits, or those of a day, oldest first. Raises LakeError if one cannot be read."""
        try:
            names = [entry.name for entry in os.scandir(self._manifests) if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LakeError(f"The lake in {self.root} cannot be read: {error.strerror}.") from error
        manifests = [self._read(self._manifests / name) for name in names if name.startswith(day)]
        return sorted(manifests, key=lambda commit: (commit.day, commit.attempt))

    def require_files(self, commit: Commit, *frames: str) -> None:
        """Raise LakeError unless all files of a commit, or of some of its frames, exist with their size."""
        for name, written in commit.frames.items():
            for file, size in written.files.items() if not frames or name in frames else ():
                try:
                    found = (self.root / file).stat().st_size
                except OSError as error:
                    raise LakeError(
                        f"The file {file} of {commit.name} in the lake in {self.root} cannot be read: {error.strerror}. "
                        "Restore it from a backup of the lake."
                    ) from error
                if found != size:
                    raise LakeError(
                        f"The file {file} of {commit.name} in {self.root} has {found} bytes instead of {size}. "
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
        """Flush the files and their folders to disk, before the manifest names them."""
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
        if error.errno != errno.EINVAL:  # not supported by some file systems, which do not need it
            raise
    finally:
        os.close(descriptor)


DAY = timedelta(days=1)
ALWAYS_ARCHIVED = frozenset(TIMED_FRAMES) - {
    RECORDED.name
}  # the tables that every version archives, and that are pruned together


def require_own_lake(lake: Lake, commits: Iterable[Commit], source: str, committed: Mapping[str, int]) -> None:
    """
    Raise LakeError if the lake belongs to another database, or lacks a day that was archived in it.

    Args:
        source: the source id of the database.
        committed: days that are in the lake according to the database -> their attempt.
    """
    commits = list(commits)
    if others := {commit.source for commit in commits} - {source}:
        raise LakeError(f"The lake in {lake.root} belongs to database {sorted(others)[0]}; this one is {source}.")
    there = {(commit.day, commit.attempt) for commit in commits}
    if missing := sorted(set(committed.items()) - there):
        raise LakeError(
            f"The lake in {lake.root} lacks {missing[0][0]}.a{missing[0][1]}, which was archived there. Check that the right "
            "folder is mounted. If only the manifest is lost, restore it from outbox_archived_day in the database."
        )


def complete_since(
    commits: Sequence[Commit],
    days: Iterable[date],
    *,
    born: datetime,
    kept: timedelta,
    without: datetime,
    frames: Collection[str] = ALWAYS_ARCHIVED,
) -> datetime | None:
    """
    Return from when on every deleted row is in the lake. None: from the beginning.

    All rows about messages that were claimed after the first archive are archived. About earlier messages, rows may have been
    pruned before. A day that is neither in the database nor in the lake was dropped while there was no archive; the history is
    complete from the first archive after it.

    Args:
        commits: all commits, oldest first.
        days: the days in the database or in the lake.
        born: when the outbox was installed.
        kept: the age at which rows are pruned without an archive.
        without: from when on the database alone is complete.
        frames: the names of the frames in question; commits without them were made by an older version.
    """
    having = [commit for commit in commits if any(name in commit.frames for name in frames)]
    birth, known = born.astimezone(UTC).date(), set(days)
    first = max(min(known, default=birth), birth)
    ages = range((without.astimezone(UTC).date() - first).days)
    holes = [day for day in (first + n * DAY for n in ages) if day not in known]
    began = min((_written(commit) for commit in having if not holes or commit.day > str(holes[-1])), default=without)
    is_from_birth = bool(having) and not holes and first <= birth and having[0] == commits[0]
    if is_from_birth and (began - kept < born or _begins_unpruned(having, frames)):
        return None
    return min(began, without)


def _begins_unpruned(commits: Iterable[Commit], frames: Collection[str]) -> bool:
    """Return whether the first commit with rows has some of these frames, which pruning would have deleted."""
    for commit in commits:
        if any(commit.frames[name].rows for name in frames if name in commit.frames):
            return True
        if commit.frames[MESSAGES.name].rows:
            return False
    return False


def _written(commit: Commit) -> datetime:
    try:
        return datetime.fromisoformat(commit.written_at)
    except ValueError as error:
        raise LakeError(f"The manifest {commit.name} does not say when it was written. Restore it from a backup.") from error

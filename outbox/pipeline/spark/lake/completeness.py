"""Check that a lake belongs to a database, and from when on the two together are complete."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.commit import Commit
from outbox.pipeline.spark.lake.frames import MESSAGES, RECORDED, TIMED_FRAMES
from outbox.pipeline.spark.lake.manifest import Lake

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

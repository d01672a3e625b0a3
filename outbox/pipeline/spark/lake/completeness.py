"""Whose lake it is, and from when on a database and its lake together hold all that there was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake import frames
from outbox.pipeline.spark.lake.commit import Commit
from outbox.pipeline.spark.lake.frames import MESSAGES, RECORDED
from outbox.pipeline.spark.lake.manifest import Lake

DAY = timedelta(days=1)
TIMED_FRAMES = frozenset(frames.TIMED_FRAMES) - {RECORDED.name}  # they were always archived, and pruned alike


def require_own_lake(lake: Lake, commits: Iterable[Commit], source: str, committed: Mapping[str, int]) -> None:
    """
    Refuse another database's lake, and one that lost a day: perhaps nobody else has it.

    Args:
        source: id of the database.
        committed: days that the database says the lake has -> their attempt.

    Raises:
        LakeError: it is one of these.
    """
    commits = list(commits)
    if strangers := {commit.source for commit in commits} - {source}:
        raise LakeError(f"The lake in {lake.root} is of the database {sorted(strangers)[0]}; this one is {source}.")
    there = {(commit.day, commit.attempt) for commit in commits}
    if missing := sorted(set(committed.items()) - there):
        raise LakeError(
            f"The lake in {lake.root} has no {missing[0][0]}.a{missing[0][1]}, which was archived there. Is the right "
            "folder mounted? If only the manifest is lost: the database has its text, in outbox_archived_day."
        )


def complete_since(
    commits: Sequence[Commit],
    days: Iterable[date],
    *,
    born: datetime,
    kept: timedelta,
    without: datetime,
    books: Collection[str] = TIMED_FRAMES,
) -> datetime | None:
    """
    Return from when on nothing was dropped that is not in the lake; None: nothing ever was.

    What is claimed after the archive began finds its day archived, and each row about it. Of what was there before, rows may
    have been pruned whose day was not. A day that is nowhere was dropped while there was no archive: it begins anew then.

    Args:
        commits: all there are, oldest first.
        days: those that the database or the lake has.
        born: when the outbox was made.
        kept: without an archive, rows are pruned when they are as old.
        without: from when on the database alone is whole.
        books: the frames that it is about; commits without them are older than they.
    """
    having = [commit for commit in commits if any(name in commit.frames for name in books)]
    birth, known = born.astimezone(UTC).date(), set(days)
    first = max(min(known, default=birth), birth)
    ages = range((without.astimezone(UTC).date() - first).days)
    holes = [day for day in (first + n * DAY for n in ages) if day not in known]
    began = min((_written(commit) for commit in having if not holes or commit.day > str(holes[-1])), default=without)
    is_from_birth = bool(having) and not holes and first <= birth and having[0] == commits[0]
    if is_from_birth and (began - kept < born or _begins_unpruned(having, books)):
        return None
    return min(began, without)


def _begins_unpruned(commits: Iterable[Commit], books: Collection[str]) -> bool:
    """Return whether the first that has anything has rows of the books: pruning would have taken all up to its day's end."""
    for commit in commits:
        if any(commit.frames[name].rows for name in books if name in commit.frames):
            return True
        if commit.frames[MESSAGES.name].rows:
            return False
    return False


def _written(commit: Commit) -> datetime:
    try:
        return datetime.fromisoformat(commit.written_at)
    except ValueError as error:
        raise LakeError(f"The manifest {commit.name} does not say when it was written. Bring it back from a copy.") from error

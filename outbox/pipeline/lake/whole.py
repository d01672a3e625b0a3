"""Whose lake it is, and from when on a database and its lake together hold all that there was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta

from outbox.pipeline.errors import LakeError
from outbox.pipeline.lake.base import Commit, Lake

DAY = timedelta(days=1)


def insist_on_ours(lake: Lake, commits: Iterable[Commit], source: str, deleted: Mapping[str, int]) -> None:
    """
    Refuse another database's lake, and one that lost what nobody else has.

    Args:
        source: id of the database.
        deleted: days that the database says the lake alone has -> their attempt.

    Raises:
        LakeError: it is one of these.
    """
    commits = list(commits)
    if strangers := {commit.source for commit in commits} - {source}:
        raise LakeError(f"The lake in {lake.root} is of the database {sorted(strangers)[0]}; this one is {source}.")
    there = {(commit.day, commit.attempt) for commit in commits}
    if missing := sorted(set(deleted.items()) - there):
        raise LakeError(
            f"The lake in {lake.root} has no {missing[0][0]}.a{missing[0][1]}, which was archived there. Is the right "
            "folder mounted?"
        )


def whole_since(
    commits: Collection[Commit], days: Iterable[date], *, born: datetime, kept: timedelta, without: datetime
) -> datetime | None:
    """
    Say from when on nothing was dropped that is not in the lake; None: nothing ever was.

    What is claimed after the archive began finds its day archived, and each row about it. Of what was there before, rows may
    have been pruned whose day was not. A day that is nowhere was dropped while there was no archive: it begins anew then.

    Args:
        commits: those that hold the rows which it is about.
        days: those that the database or the lake has.
        born: when the outbox was made.
        kept: without an archive, rows are pruned when they are as old.
        without: from when on the database alone is whole.
    """
    known = set(days)
    first = max(min(known, default=born.date()), born.astimezone(UTC).date())
    ages = range((without.astimezone(UTC).date() - first).days)
    holes = [day for day in (first + n * DAY for n in ages) if day not in known]
    began = min((_written(commit) for commit in commits if not holes or commit.day > str(holes[-1])), default=without)
    had_begun = not holes and min(known, default=date.max) <= born.astimezone(UTC).date() + DAY and began - kept < born
    return None if had_begun else min(began, without)


def _written(commit: Commit) -> datetime:
    try:
        return datetime.fromisoformat(commit.written_at)
    except ValueError as error:
        raise LakeError(f"The manifest {commit.name} does not say when it was written. Bring it back from a copy.") from error

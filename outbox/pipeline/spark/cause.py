"""
Why there is a backlog. Plain Python over rows by the minute, so that Spark, SQL and tests ask the same function.

Whether a backlog grows is seen in the last ten minutes; what has changed, against the quarter of an hour before. After
that quarter the change would look normal: so an episode keeps the cause it began with, until the backlog stops growing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CURRENT = 10  # minutes
BASELINE = 15
GROWING = 0.05  # of the input
REPEATED = 0.2  # of the attempts
FASTER = 1.3
SLOWER = 0.7
LONGEST = 14 * 24 * 60  # minutes; a time that cannot be would make the course of a backlog as long as the calendar


class Cause(enum.StrEnum):
    NONE = "none"
    SAME_AGAIN = "the same messages again and again"
    PRODUCTION_FASTER = "production faster"
    CONSUMPTION_SLOWER = "consumption slower"
    STEADY_OVERLOAD = "steady overload"


@dataclass(frozen=True)
class Minute:
    """What happened in a minute (since 1970): stored, tried, finished for the first time."""

    minute: int
    produced: int = 0
    attempts: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class BacklogState:
    """
    How a group stands with a topic at the end of a minute.

    Args:
        growth: messages a minute, over the last ten.
        onset: the minute in which the episode began; None where the backlog does not grow.
    """

    minute: int
    backlog: int
    growth: float
    cause: Cause
    onset: int | None = None


def up_to(minutes: Sequence[Minute], last: int) -> list[Minute]:
    """Return what happened up to a minute. What is older than `LONGEST` counts for the backlog with which the course begins."""
    first = last - LONGEST
    old = [one for one in minutes if one.minute < first]
    within = [one for one in minutes if first <= one.minute <= last]
    if not old:
        return within
    waiting = sum(one.produced - one.consumed for one in old)
    return [Minute(first - 1, produced=max(0, waiting), consumed=max(0, -waiting)), *within]


def backlog_states(minutes: Sequence[Minute]) -> list[BacklogState]:
    """Return how a group stands after each minute, first to last; minutes in which nothing happened included."""
    if not minutes:
        return []
    by_minute = {one.minute: one for one in minutes}
    first, last = min(by_minute), max(by_minute)
    span = [by_minute.get(minute, Minute(minute)) for minute in range(first, last + 1)]
    found: list[BacklogState] = []
    backlog = 0
    for place, one in enumerate(span):
        backlog += one.produced - one.consumed
        now, before = _sums(span[max(0, place - CURRENT + 1) : place + 1]), _sums(_baseline(span, place))
        cause = _cause(now, before)
        onset = None
        if cause is not Cause.NONE:
            episode = found[-1] if found and found[-1].cause is not Cause.NONE else None
            onset = episode.onset if episode else _onset(span, place)
            # At its first minutes an episode may not show yet what it is.
            if episode and episode.cause is not Cause.STEADY_OVERLOAD:
                cause = episode.cause
        length = min(CURRENT, place + 1)
        found.append(BacklogState(one.minute, backlog, (now["produced"] - now["consumed"]) / length, cause, onset))
    return found


def _baseline(span: Sequence[Minute], place: int) -> Sequence[Minute]:
    end = max(0, place - CURRENT + 1)
    return span[max(0, end - BASELINE) : end]


def _sums(minutes: Sequence[Minute]) -> Mapping[str, float]:
    sums: dict[str, float] = {name: sum(getattr(one, name) for one in minutes) for name in ("produced", "attempts", "consumed")}
    return {**sums, "minutes": len(minutes)}


def _cause(now: Mapping[str, float], before: Mapping[str, float]) -> Cause:
    """Apply the rules in their order: repeats first, since they slow consumption as well."""
    if now["produced"] - now["consumed"] <= GROWING * now["produced"]:
        return Cause.NONE
    if now["attempts"] and (now["attempts"] - now["consumed"]) / now["attempts"] >= REPEATED:
        return Cause.SAME_AGAIN
    if before["minutes"] == 0:
        return Cause.STEADY_OVERLOAD
    if _rate(now, "produced") >= FASTER * _rate(before, "produced"):
        return Cause.PRODUCTION_FASTER
    if _rate(now, "consumed") <= SLOWER * _rate(before, "consumed"):
        return Cause.CONSUMPTION_SLOWER
    return Cause.STEADY_OVERLOAD


def _rate(sums: Mapping[str, float], name: str) -> float:
    return sums[name] / max(1, sums["minutes"])


def _onset(span: Sequence[Minute], place: int) -> int:
    """Go back from where it shows to the first minute of the window in which more came in than was finished."""
    start = place
    while start > max(0, place - CURRENT + 1) and span[start - 1].produced - span[start - 1].consumed > (
        GROWING * span[start - 1].produced
    ):
        start -= 1
    return span[start].minute

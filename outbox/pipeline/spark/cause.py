"""
The cause of a backlog, from counts per minute. Plain Python, so that Spark, SQL and tests share this code.

A backlog grows if it did in the last ten minutes. Its cause is what changed against the 15 minutes before. After a while the
change would look normal, so an episode keeps the cause it began with until the backlog stops growing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CURRENT = 10  # minutes
BASELINE = 15  # minutes
GROWING = 0.05  # a backlog grows if it gains more than this share of the produced messages
REPEATED = 0.2  # the share of retries among deliveries from which on retries are the cause
FASTER = 1.3  # times the baseline
SLOWER = 0.7  # times the baseline
LONGEST = 14 * 24 * 60  # minutes; limits the result if a time is damaged


class BacklogCause(enum.StrEnum):
    NONE = "none"
    RETRIES = "repeated retries"
    PRODUCTION_FASTER = "production faster"
    CONSUMPTION_SLOWER = "consumption slower"
    STEADY_OVERLOAD = "steady overload"


@dataclass(frozen=True)
class BacklogMinute:
    """The counts of a minute (since 1970): messages stored, deliveries, messages finished."""

    minute: int
    produced: int = 0
    deliveries: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class BacklogState:
    """
    The backlog of a group and topic at the end of a minute.

    Args:
        growth: messages per minute, over the last ten.
        onset: the minute in which the episode began; None if the backlog does not grow.
    """

    minute: int
    backlog: int
    growth: float
    cause: BacklogCause
    onset: int | None = None


def up_to(minutes: Sequence[BacklogMinute], last: int) -> list[BacklogMinute]:
    """Return the minutes up to the last one. Those older than `LONGEST` are merged into one initial backlog."""
    first = last - LONGEST
    old = [minute for minute in minutes if minute.minute < first]
    within = [minute for minute in minutes if first <= minute.minute <= last]
    if not old:
        return within
    waiting = sum(minute.produced - minute.consumed for minute in old)
    return [BacklogMinute(first - 1, produced=max(0, waiting), consumed=max(0, -waiting)), *within]


def backlog_states(minutes: Sequence[BacklogMinute]) -> list[BacklogState]:
    """Return the backlog after each minute, from the first to the last, including minutes without messages."""
    if not minutes:
        return []
    by_minute = {minute.minute: minute for minute in minutes}
    first, last = min(by_minute), max(by_minute)
    span = [by_minute.get(minute, BacklogMinute(minute)) for minute in range(first, last + 1)]
    states: list[BacklogState] = []
    backlog = 0
    for place, one in enumerate(span):
        backlog += one.produced - one.consumed
        now, before = _sums(span[max(0, place - CURRENT + 1) : place + 1]), _sums(_baseline(span, place))
        cause = _cause(now, before)
        onset = None
        if cause is not BacklogCause.NONE:
            episode = states[-1] if states and states[-1].cause is not BacklogCause.NONE else None
            onset = episode.onset if episode else _onset(span, place)
            # The cause of an episode may not be visible in its first minutes.
            if episode and episode.cause is not BacklogCause.STEADY_OVERLOAD:
                cause = episode.cause
        length = min(CURRENT, place + 1)
        states.append(BacklogState(one.minute, backlog, (now["produced"] - now["consumed"]) / length, cause, onset))
    return states


def _baseline(span: Sequence[BacklogMinute], place: int) -> Sequence[BacklogMinute]:
    end = max(0, place - CURRENT + 1)
    return span[max(0, end - BASELINE) : end]


def _sums(minutes: Sequence[BacklogMinute]) -> Mapping[str, float]:
    sums: dict[str, float] = {
        name: sum(getattr(minute, name) for minute in minutes) for name in ("produced", "deliveries", "consumed")
    }
    return {**sums, "minutes": len(minutes)}


def _cause(now: Mapping[str, float], before: Mapping[str, float]) -> BacklogCause:
    """Apply the rules in order: retries first, since they also slow consumption."""
    if now["produced"] - now["consumed"] <= GROWING * now["produced"]:
        return BacklogCause.NONE
    if now["deliveries"] and (now["deliveries"] - now["consumed"]) / now["deliveries"] >= REPEATED:
        return BacklogCause.RETRIES
    if before["minutes"] == 0:
        return BacklogCause.STEADY_OVERLOAD
    if _rate(now, "produced") >= FASTER * _rate(before, "produced"):
        return BacklogCause.PRODUCTION_FASTER
    if _rate(now, "consumed") <= SLOWER * _rate(before, "consumed"):
        return BacklogCause.CONSUMPTION_SLOWER
    return BacklogCause.STEADY_OVERLOAD


def _rate(sums: Mapping[str, float], name: str) -> float:
    return sums[name] / max(1, sums["minutes"])


def _onset(span: Sequence[BacklogMinute], place: int) -> int:
    """Return the first of the preceding minutes, within the window, since when the backlog has been growing."""
    start = place
    while start > max(0, place - CURRENT + 1) and span[start - 1].produced - span[start - 1].consumed > (
        GROWING * span[start - 1].produced
    ):
        start -= 1
    return span[start].minute

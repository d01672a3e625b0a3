"""
Latency histograms, and backlogs with their causes, in plain Python, so that jobs, admin, SQL and tests share them.

    1.4 s -> bin 164;  {164: 7, 172: 3} -> p50: 1.4 s, p95: 2.9 s

    minute   stored  handled  backlog  cause
    10:01       100      100        0  none
    10:02       400      120      280  production faster

Bins are logarithmic, eight per doubling, so each is 9 % wide. Histograms of minutes, topics or runs can be added by adding their
counts, and a percentile is accurate to one bin.

A backlog grows if it did in the last ten minutes, and its cause is what changed against the 15 minutes before. After a while the
change would look normal, so an episode keeps the cause it began with until the backlog stops growing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

BINS_PER_DOUBLING = 8
INSTANT = 0  # the bin of 1 microsecond and less
BACKWARDS = -1  # the bin of negative latencies: a clock has jumped
COUNTED = -2  # not a latency, but how many messages arrived

SHARES = (0.5, 0.95, 0.99, 0.999)


def percentile(histogram: Mapping[int, int], share: float) -> float | None:
    """
    Return the latency, in seconds, that a share of the messages did not exceed. None: the histogram is empty.

    Negative latencies are ignored.
    """
    bins = sorted((edge, n) for edge, n in histogram.items() if edge != BACKWARDS and n)
    wanted = share * sum(n for _, n in bins)
    seen = 0
    for edge, n in bins:
        seen += n
        if seen >= wanted:
            return 1e-6 if edge == INSTANT else 2 ** ((edge - 0.5) / BINS_PER_DOUBLING) / 1e6
    return None


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

    def grows(self) -> bool:
        """Return whether the backlog grows by these counts."""
        return self.produced - self.consumed > GROWING * self.produced


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
    waiting = sum(minute.produced - minute.consumed for minute in minutes if minute.minute < first)
    is_old = any(minute.minute < first for minute in minutes)
    old = [BacklogMinute(first - 1, produced=max(0, waiting), consumed=max(0, -waiting))] if is_old else []
    return old + [minute for minute in minutes if first <= minute.minute <= last]


def backlog_states(minutes: Sequence[BacklogMinute]) -> list[BacklogState]:
    """Return the backlog after each minute, from the first to the last, including minutes without messages."""
    if not minutes:
        return []
    by_minute = {minute.minute: minute for minute in minutes}
    span = [by_minute.get(minute, BacklogMinute(minute)) for minute in range(min(by_minute), max(by_minute) + 1)]
    sums = [[0, *accumulate(getattr(minute, name) for minute in span)] for name in ("produced", "deliveries", "consumed")]
    states: list[BacklogState] = []
    for place in range(len(span)):
        begin = max(0, place + 1 - CURRENT)
        before = max(0, begin - BASELINE)
        now = BacklogMinute(place + 1 - begin, *(of[place + 1] - of[begin] for of in sums))
        cause = _cause(now, BacklogMinute(begin - before, *(of[begin] - of[before] for of in sums)))
        onset = None
        if cause is not BacklogCause.NONE:
            episode = states[-1] if states and states[-1].cause is not BacklogCause.NONE else None
            onset = episode.onset if episode else _onset(span, place)
            # The cause of an episode may not be visible in its first minutes.
            if episode and episode.cause is not BacklogCause.STEADY_OVERLOAD:
                cause = episode.cause
        growth = (now.produced - now.consumed) / now.minute
        states.append(BacklogState(span[place].minute, sums[0][place + 1] - sums[2][place + 1], growth, cause, onset))
    return states


def _cause(now: BacklogMinute, before: BacklogMinute) -> BacklogCause:
    """Compare the sums of two spans, whose `minute` is their length. Retries come first, since they also slow consumption."""
    if not now.grows():
        return BacklogCause.NONE
    if now.deliveries and (now.deliveries - now.consumed) / now.deliveries >= REPEATED:
        return BacklogCause.RETRIES
    if before.minute == 0:
        return BacklogCause.STEADY_OVERLOAD
    if now.produced / now.minute >= FASTER * before.produced / before.minute:
        return BacklogCause.PRODUCTION_FASTER
    if now.consumed / now.minute <= SLOWER * before.consumed / before.minute:
        return BacklogCause.CONSUMPTION_SLOWER
    return BacklogCause.STEADY_OVERLOAD


def _onset(span: Sequence[BacklogMinute], place: int) -> int:
    """Return the first of the preceding minutes, within the window, since when the backlog has been growing."""
    start = place
    while start > max(0, place - CURRENT + 1) and span[start - 1].grows():
        start -= 1
    return span[start].minute

"""
Latency percentiles from histograms, and backlogs with their causes. It is plain Python, so jobs, admin and tests share it.

    1.4 s -> bin 164;  {164: 7, 172: 3} -> p50: 1.4 s, p95: 2.8 s

    minute   stored  handled  backlog  cause
    10:01       100      100        0  none
    10:02       400      120      280  production faster

Bins are logarithmic, eight per doubling, so each is 9 % wide and a percentile is accurate to one bin. The histograms of several
minutes, topics or runs are added by adding their counts.

A backlog counts as growing if it grew over the last ten minutes. The cause follows from a comparison of their rates with those of
the 15 minutes before. After a while, the changed rates would be part of this baseline. So an episode, in which the backlog grows
without a break, keeps the cause with which it began.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

BINS_PER_DOUBLING = 8
INSTANT = 0  # the bin of latencies up to 1 microsecond
BACKWARDS = -1  # the bin of negative latencies, which mean that a clock has jumped
ARRIVED = -2  # this bin counts all messages that arrived, whatever their latency

SHARES = (0.5, 0.95, 0.99, 0.999)


def percentile(histogram: Mapping[int, int], share: float) -> float | None:
    """
    Return the latency, in seconds, that a share of the messages did not exceed. None: there is no message.

    Messages with a negative latency are ignored.
    """
    bins = sorted((bin_number, n) for bin_number, n in histogram.items() if bin_number != BACKWARDS and n)
    target = share * sum(n for _, n in bins)
    counted = 0
    for bin_number, n in bins:
        counted += n
        if counted >= target:
            return 1e-6 if bin_number == INSTANT else 2 ** ((bin_number - 0.5) / BINS_PER_DOUBLING) / 1e6
    return None


CURRENT_MINUTES = 10  # the length of the window that shows whether a backlog grows
BASELINE_MINUTES = 15  # the length of the window before it, with which its rates are compared
GROWTH_SHARE = 0.05  # a backlog grows if it gains more than this share of the produced messages
RETRY_SHARE = 0.2  # retries are the cause if at least this share of the deliveries is unsuccessful
FASTER_FACTOR = 1.3  # production counts as faster if its rate is at least this multiple of the baseline's
SLOWER_FACTOR = 0.7  # consumption counts as slower if its rate is at most this multiple
MAX_MINUTES = 14 * 24 * 60  # limits the result if a row has a wrong time


class BacklogCause(enum.StrEnum):
    NONE = "none"
    RETRIES = "repeated retries"
    PRODUCTION_FASTER = "production faster"
    CONSUMPTION_SLOWER = "consumption slower"
    STEADY_OVERLOAD = "steady overload"


@dataclass(frozen=True)
class BacklogMinute:
    """
    The counts of one minute for a group and topic: messages stored, deliveries, messages finished.

    Args:
        minute: minutes since 1970.
    """

    minute: int
    produced: int = 0
    deliveries: int = 0
    consumed: int = 0

    def grows(self) -> bool:
        """Return whether the backlog grows according to these counts."""
        return self.produced - self.consumed > GROWTH_SHARE * self.produced


@dataclass(frozen=True)
class BacklogState:
    """
    The backlog of a group and topic at the end of a minute.

    Args:
        growth: messages per minute, averaged over the last ten minutes.
        onset: the minute since which the backlog has been growing; None if it does not grow.
    """

    minute: int
    backlog: int
    growth: float
    cause: BacklogCause
    onset: int | None = None


def minutes_up_to(minutes: Sequence[BacklogMinute], last: int) -> list[BacklogMinute]:
    """Return the minutes up to `last`. Minutes more than `MAX_MINUTES` before it are merged into one initial backlog."""
    first = last - MAX_MINUTES
    waiting = sum(minute.produced - minute.consumed for minute in minutes if minute.minute < first)
    is_old = any(minute.minute < first for minute in minutes)
    initial = [BacklogMinute(first - 1, produced=max(0, waiting), consumed=max(0, -waiting))] if is_old else []
    return initial + [minute for minute in minutes if first <= minute.minute <= last]


def backlog_states(minutes: Sequence[BacklogMinute]) -> list[BacklogState]:
    """Return the backlog after each minute, from the first to the last, including minutes without messages."""
    if not minutes:
        return []
    by_minute = {minute.minute: minute for minute in minutes}
    all_minutes = [by_minute.get(minute, BacklogMinute(minute)) for minute in range(min(by_minute), max(by_minute) + 1)]
    # Running totals of each count: the count in a window is the difference of two of them.
    sums = [[0, *accumulate(getattr(minute, name) for minute in all_minutes)] for name in ("produced", "deliveries", "consumed")]
    states: list[BacklogState] = []
    for index in range(len(all_minutes)):
        begin = max(0, index + 1 - CURRENT_MINUTES)
        baseline = max(0, begin - BASELINE_MINUTES)
        current = BacklogMinute(index + 1 - begin, *(totals[index + 1] - totals[begin] for totals in sums))
        cause = _cause(current, BacklogMinute(begin - baseline, *(totals[begin] - totals[baseline] for totals in sums)))
        onset = None
        if cause is not BacklogCause.NONE:
            episode = states[-1] if states and states[-1].cause is not BacklogCause.NONE else None
            onset = episode.onset if episode else _onset(all_minutes, index)
            # An episode keeps its cause, except STEADY_OVERLOAD: the actual cause may not be visible in the first minutes.
            if episode and episode.cause is not BacklogCause.STEADY_OVERLOAD:
                cause = episode.cause
        growth = (current.produced - current.consumed) / current.minute
        states.append(BacklogState(all_minutes[index].minute, sums[0][index + 1] - sums[2][index + 1], growth, cause, onset))
    return states


def _cause(current: BacklogMinute, baseline: BacklogMinute) -> BacklogCause:
    """
    Return the cause of the growth, from the sums of two windows; in both, `minute` is the length of the window in minutes.

    Retries are considered first, because they also make consumption slower.
    """
    if not current.grows():
        return BacklogCause.NONE
    if current.deliveries and (current.deliveries - current.consumed) / current.deliveries >= RETRY_SHARE:
        return BacklogCause.RETRIES
    if baseline.minute == 0:
        return BacklogCause.STEADY_OVERLOAD
    if current.produced / current.minute >= FASTER_FACTOR * baseline.produced / baseline.minute:
        return BacklogCause.PRODUCTION_FASTER
    if current.consumed / current.minute <= SLOWER_FACTOR * baseline.consumed / baseline.minute:
        return BacklogCause.CONSUMPTION_SLOWER
    return BacklogCause.STEADY_OVERLOAD


def _onset(all_minutes: Sequence[BacklogMinute], index: int) -> int:
    """Return the minute since which the backlog has been growing without a break, within the current window."""
    start = index
    while start > max(0, index - CURRENT_MINUTES + 1) and all_minutes[start - 1].grows():
        start -= 1
    return all_minutes[start].minute

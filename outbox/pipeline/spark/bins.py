"""
Histograms of latency, as numbers: no Spark and no Django, so that jobs, admin and tests read them alike.

A bin is an eighth of a doubling, 9 % wide, so histograms of minutes, topics or runs add up by adding counts, and a percentile
is never off by more than a bin.
"""

from __future__ import annotations

from collections.abc import Mapping

BINS_PER_DOUBLING = 8
INSTANT = 0  # the bin of 1 microsecond and less
BACKWARDS = -1  # the bin of times before the one they follow: a clock that jumped

SHARES = (0.5, 0.95, 0.99, 0.999)


def add(left: Mapping[int, int], right: Mapping[int, int]) -> dict[int, int]:
    """Add two histograms, bin -> count."""
    return {one: left.get(one, 0) + right.get(one, 0) for one in {*left, *right}}


def percentile(histogram: Mapping[int, int], share: float) -> float | None:
    """
    Return the latency, in seconds, that a share of the messages did not exceed; None where none is known.

    Times that run backwards say nothing, and are left out.
    """
    bins = sorted((one, n) for one, n in histogram.items() if one != BACKWARDS and n)
    wanted = share * sum(n for _, n in bins)
    seen = 0
    for one, n in bins:
        seen += n
        if seen >= wanted:
            return 1e-6 if one == INSTANT else 2 ** ((one - 0.5) / BINS_PER_DOUBLING) / 1e6
    return None

"""
Latency histograms, without Spark and Django, so that jobs, admin and tests share this code.

    1.4 s -> bin 164;  {164: 7, 172: 3} -> p50: 1.4 s, p95: 2.9 s

Bins are logarithmic, eight per doubling, so each is 9 % wide. Histograms of minutes, topics or runs can be added by adding their
counts, and a percentile is accurate to one bin.
"""

from __future__ import annotations

from collections.abc import Mapping

BINS_PER_DOUBLING = 8
INSTANT = 0  # the bin of 1 microsecond and less
BACKWARDS = -1  # the bin of negative latencies: a clock has jumped
COUNTED = -2  # not a latency, but how many messages arrived

SHARES = (0.5, 0.95, 0.99, 0.999)


def add(left: Mapping[int, int], right: Mapping[int, int]) -> dict[int, int]:
    """Return the sum of two histograms, bin -> count."""
    return {edge: left.get(edge, 0) + right.get(edge, 0) for edge in {*left, *right}}


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

"""
How long messages took, as histograms that can be added: per topic, hop and minute.

A bin is an eighth of a doubling, 9 % wide, so histograms of minutes, topics or runs add up by adding counts, and a percentile
is never off by more than a bin. Times since the publish are read from the message id, so no hop needs a join.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.times import published_micros

BINS_PER_DOUBLING = 8
INSTANT = 0  # the bin of 1 microsecond and less
BACKWARDS = -1  # the bin of times before the one they follow: a clock that jumped

SHARES = (0.5, 0.95, 0.99, 0.999)


def histograms(places: DataFrame, broker: DataFrame, inbox: DataFrame, tolerance_seconds: float = 0.0) -> DataFrame:
    """
    Count latencies.

    Takes what `schemas` names. Gives topic, hop, consumer_group, minute, bin, n. Hops: `claim` (publish to claim), `send`
    (claim to sent), `store` (publish to stored), `handle` (publish to handled, by group).

    Args:
        tolerance_seconds: so much too early counts as an instant, since clocks differ.
    """
    published = published_micros(F.col("message_id"))
    nobody = F.lit("")
    sent = places.where(F.col("state") == "sent")
    hops = [
        _hop(sent, "claim", nobody, F.unix_micros("claimed_at"), published),
        _hop(sent, "send", nobody, F.unix_micros("at"), F.unix_micros("claimed_at")),
        _hop(broker, "store", nobody, F.unix_micros("at"), published),
        _hop(inbox, "handle", F.col("consumer_group"), F.unix_micros("at"), published),
    ]
    minute = F.timestamp_micros(F.col("end") - F.pmod(F.col("end"), F.lit(60_000_000)))
    return (
        reduce(DataFrame.unionAll, hops)
        .where(F.col("end").isNotNull() & F.col("start").isNotNull())
        .groupBy("topic", "hop", "consumer_group", minute.alias("minute"), _bin(tolerance_seconds).alias("bin"))
        .agg(F.count("*").alias("n"))
        .select("topic", "hop", "consumer_group", "minute", "bin", "n")
    )


def _hop(frame: DataFrame, name: str, group: Column, end: Column, start: Column) -> DataFrame:
    """Give topic, hop, consumer_group, start, end (microseconds)."""
    columns = {"hop": F.lit(name), "consumer_group": group, "start": start, "end": end}
    return frame.select("topic", *(column.alias(alias) for alias, column in columns.items()))


def _bin(tolerance_seconds: float) -> Column:
    micros = F.col("end") - F.col("start")
    return (
        F.when(micros < -int(tolerance_seconds * 1_000_000), BACKWARDS)
        .when(micros <= 1, INSTANT)
        .otherwise(F.floor(F.log2(micros) * BINS_PER_DOUBLING) + 1)
        .cast("int")
    )


def add(left: Mapping[int, int], right: Mapping[int, int]) -> dict[int, int]:
    """Add two histograms, bin -> count."""
    return {one: left.get(one, 0) + right.get(one, 0) for one in {*left, *right}}


def percentile(histogram: Mapping[int, int], share: float) -> float | None:
    """
    Give the latency, in seconds, that a share of the messages did not exceed; None where none is known.

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

"""
How long messages took, as histograms that can be added: per topic, hop and minute. `bins` says what a bin is.

Times since the publish are read from the message id, so no hop needs a join.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.bins import BACKWARDS, BINS_PER_DOUBLING, INSTANT
from outbox.pipeline.times import published_micros


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

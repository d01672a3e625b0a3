"""
Backlog by group, topic and minute: what came in, what was tried, what was finished.

Only rows by the minute leave this room; what they mean, `cause` says.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def minutes(broker: DataFrame, inbox: DataFrame, attempts: DataFrame, readers: DataFrame) -> DataFrame:
    """
    Count by minute.

    Takes what `schemas` names; readers: consumer_group, topic. Gives consumer_group, topic, minute (since 1970), produced,
    attempts, consumed. A message was tried as often as its last delivery says, each try counted where it is written down.
    """
    minute = F.expr("unix_micros(at) div 60000000").alias("minute")
    one, none = F.lit(1), F.lit(0)
    keys = ["consumer_group", "topic", "minute"]
    tried = F.col("outcome").isin("retry", "dead letter", "duplicate") & F.col("at").isNotNull()
    tries = _once(attempts.where(tried))
    done = F.when(F.col("outcome") == "dead letter", 1).otherwise(0)
    parts = [
        broker.where(F.col("at").isNotNull())
        .select("topic", minute)
        .groupBy("topic", "minute")
        .agg(F.count("*").alias("produced"))
        .join(F.broadcast(readers), "topic")
        .select(*keys, "produced", none.alias("attempts"), none.alias("consumed")),
        inbox.select("consumer_group", "topic", minute, none.alias("produced"), one.alias("attempts"), one.alias("consumed")),
        tries.select("consumer_group", "topic", minute, none.alias("produced"), one.alias("attempts"), done.alias("consumed")),
    ]
    return (
        reduce(DataFrame.unionAll, parts)
        .groupBy(*keys)
        .agg(*(F.sum(name).cast("bigint").alias(name) for name in ("produced", "attempts", "consumed")))
        .select(*keys, "produced", "attempts", "consumed")
    )


def most_repeated(attempts: DataFrame, *, limit: int) -> DataFrame:
    """Give consumer_group, topic, message_id, tries of the messages tried most often, at most `limit` of each topic."""
    from pyspark.sql import Window

    keys = ["consumer_group", "topic"]
    rank = F.row_number().over(Window.partitionBy(*keys).orderBy(F.desc("tries"), "message_id"))
    return (
        _once(attempts.where(F.col("outcome").isin("retry", "dead letter")))
        .groupBy(*keys, "message_id")
        .agg(F.count("*").alias("tries"))
        .where(F.col("tries") > 1)
        .withColumn("rank", rank)
        .where(F.col("rank") <= limit)
        .select(*keys, "message_id", "tries")
    )


def _once(tries: DataFrame) -> DataFrame:
    """Make one row of each try: a dead letter is written down by its group, and again by its broker."""
    return tries.groupBy("consumer_group", "topic", "message_id", "nth", "outcome").agg(F.min("at").alias("at"))

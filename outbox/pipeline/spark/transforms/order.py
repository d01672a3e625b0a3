"""Order of a key: in ordered topics, nothing comes behind a later one of its key."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F


def out_of_order(frame: DataFrame, keys: list[str], *orders: list[str]) -> DataFrame:
    """
    Return the rows that come behind a higher number of the same keys, in each of these orders.

    Takes number and the columns named. Gives the frame's columns, of those rows, and `overtaken_by`: that number in the first
    order. Rows are spread by key: a key is a customer or an order, so no task gets half of them.
    """
    before = {
        f"before_{nth}": F.max("number").over(Window.partitionBy(*keys).orderBy(*by).rowsBetween(Window.unboundedPreceding, -1))
        for nth, by in enumerate(orders)
    }
    return (
        frame.where(F.col("number").isNotNull())
        .withColumns(before)
        .where(reduce(Column.__and__, [F.col(name) > F.col("number") for name in before]))
        .select(*frame.columns, F.col("before_0").alias("overtaken_by"))
    )


def with_generation(frame: DataFrame, keys: list[str], *, tolerance_seconds: float) -> DataFrame:
    """
    Add `generation`: how often, by then, the places of a key began anew.

    A topic or a broker that is made anew counts its positions from 0, and a topic with more queues has a key's messages in
    another one. So the places of a key tell their order only as long as they go up with time, as far as clocks agree.
    """
    in_time = Window.partitionBy(*keys).orderBy(F.col("at").asc_nulls_first(), "queue", "pos")
    at, earlier = F.unix_micros("at"), F.unix_micros(F.lag("at").over(in_time))
    is_elsewhere = (F.col("queue") != F.lag("queue").over(in_time)) | (F.col("pos") < F.lag("pos").over(in_time))
    is_anew = is_elsewhere & (at > earlier + int(tolerance_seconds * 1_000_000))
    return (
        frame.where(F.col("number").isNotNull())
        .withColumn("is_anew", F.coalesce(is_anew, F.lit(False)).cast("int"))
        .withColumn("generation", F.sum("is_anew").over(in_time.rowsBetween(Window.unboundedPreceding, Window.currentRow)))
        .drop("is_anew")
    )

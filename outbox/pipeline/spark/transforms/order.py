"""Find messages that are out of order within their key."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F


def out_of_order(frame: DataFrame, keys: list[str], *orders: list[str]) -> DataFrame:
    """
    Return the rows that come after a higher number of the same keys, in each of the given orders.

    Takes the column number and the given ones. Returns the frame's columns, and `overtaken_by`: the higher number in the first
    order. Rows are partitioned by key: a key is a customer or an order, so the partitions are small.
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
    Add the column `generation`: how often the positions of a key have started again until then.

    If a topic or broker is created again, positions start at 0; if a topic gets more queues, a key may move to another one. So
    the positions of a key define an order only as long as they increase with time, within the tolerance of clocks.
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

"""Order of a key: in ordered topics, nothing comes behind a later one of its key."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F


def out_of_order(frame: DataFrame, keys: list[str], by: list[str]) -> DataFrame:
    """
    Give the rows that come behind a higher number of the same keys.

    Takes number and the columns named. Gives the frame's columns, of those rows, and `overtaken_by`: that number. Rows are
    spread by key: a key is a customer or an order, so no task gets half of them.
    """
    before = Window.partitionBy(*keys).orderBy(*by).rowsBetween(Window.unboundedPreceding, -1)
    return (
        frame.where(F.col("number").isNotNull())
        .withColumn("overtaken_by", F.max("number").over(before))
        .where(F.col("overtaken_by") > F.col("number"))
        .select(*frame.columns, "overtaken_by")
    )

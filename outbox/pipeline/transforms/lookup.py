"""From numbers back to messages: a few rows of a stage, found by lane and number."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.transforms.numbers import BUCKET

NUMBER = "source string, topic string, lane smallint, number bigint"
SPOT = "source string, topic string, lane smallint, bucket bigint"


def ids_of(frame: DataFrame, numbers: Iterable[tuple[str, str, int, int]]) -> DataFrame:
    """
    Find the messages that have these numbers.

    Takes source, topic, lane, number, message_id. Gives the same, for those numbers only.
    """
    spark = frame.sparkSession
    wanted = F.broadcast(spark.createDataFrame(list(numbers), NUMBER))
    columns = ["source", "topic", "lane", "number"]
    return frame.join(wanted, columns).select(*columns, "message_id").distinct()


def repeated(frame: DataFrame, spots: Iterable[tuple[str, str, int, int]], also: list[str], *, ids: int) -> DataFrame:
    """
    Find the numbers that are there more than once, in the buckets where that is known to be so.

    Takes source, topic, lane, number, message_id and `also`. Gives source, topic, lane, `also`, number, n, messages (how
    many different ones), ids.
    """
    spark = frame.sparkSession
    dirty = F.broadcast(spark.createDataFrame(list(spots), SPOT).distinct())
    bucket = F.expr(f"(number - 1) div {BUCKET}")
    keys = ["source", "topic", "lane", *also, "number"]
    return (
        frame.where(F.col("number") >= 1)
        .withColumn("bucket", bucket)
        .join(dirty, ["source", "topic", "lane", "bucket"])
        .groupBy(*keys)
        .agg(F.count("*").alias("n"), F.sort_array(F.collect_set("message_id")).alias("ids"))
        .where(F.col("n") > 1)
        .select(*keys, "n", F.size("ids").alias("messages"), F.slice("ids", 1, ids).alias("ids"))
    )

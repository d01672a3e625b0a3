"""
Which messages came after a later one of their key, in topics that keep order.

    key "k", by position in the queue: numbers 1 3 2 4  ->  2 is out of order, after 3
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import Breach, FindingKind, Stage
from outbox.pipeline.spark.history import History

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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


OF_A_KEY = ["topic", "source", "lane", "key"]  # numbers of different lanes cannot be compared


def audit_order(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """Return the messages of ordered topics that came after a later message of their key."""
    if not config.ordered_topics:
        return []
    is_ordered = F.col("topic").isin(*config.ordered_topics)
    tolerance = config.clock_tolerance_seconds
    stored = with_generation(history.broker.where(is_ordered), OF_A_KEY, tolerance_seconds=tolerance)
    late_stored = out_of_order(stored, OF_A_KEY, ["queue", "pos"], ["generation", "queue", "pos"])
    keys = history.messages.where(is_ordered).select("message_id", "key")
    handled = history.inbox.where(is_ordered).join(keys, "message_id")
    late_handled = out_of_order(handled, ["consumer_group", *OF_A_KEY], ["at", "number"])
    return [
        *_findings(Stage.BROKER, late_stored.withColumn("consumer_group", F.lit("")).collect()),
        *_findings(Stage.INBOX, late_handled.collect()),
    ]


def _findings(stage: Stage, rows: Iterable[Any]) -> list[Breach]:
    return [
        Breach(
            *(FindingKind.OUT_OF_ORDER, stage, row.topic, row.source, row.lane),
            group=row.consumer_group,
            first=row.number,
            last=row.number,
            count=1,
            detail=f"after {row.overtaken_by} of key {row.key!r}",
            ids=(row.message_id,),
        )
        for row in rows
    ]

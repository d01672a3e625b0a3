"""
Counts per group, topic and minute for backlogs: messages stored, deliveries, messages finished. `cause` interprets them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from outbox.pipeline.spark.transforms.columns import coded, constant, times_of
from outbox.pipeline.spark.transforms.row_counter import RowCounter

MINUTE = 60_000_000

COLUMNS = {"broker": ("topic", "at"), "inbox": ("consumer_group", "topic", "at")}

# Messages stored (with an empty group) and handled. minute: since 1970.
HAPPENED = pa.schema(
    {"frame": pa.string(), "consumer_group": pa.string(), "topic": pa.string(), "minute": pa.int64(), "n": pa.int64()}
)


def happened(frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the counts per minute of a part of a frame."""
    found = RowCounter(HAPPENED)
    for batch in batches:
        at, has_one = times_of(batch, "at")
        group = coded(batch, "consumer_group") if frame == "inbox" else constant("", len(batch))
        texts = [constant(frame, len(batch)), group, coded(batch, "topic")]
        found.add([text.of(has_one) for text in texts], [at[has_one] // MINUTE])
    yield from found.batches()


def tried(failed: DataFrame) -> DataFrame:
    """
    Return the counts of unsuccessful deliveries per minute: consumer_group, topic, minute, deliveries, consumed.

    A dead letter is finished, so it also counts as consumed.
    """
    is_tried = F.col("outcome").isin("retry", "dead letter", "duplicate") & F.col("at").isNotNull()
    minute = F.expr("unix_micros(at) div 60000000").alias("minute")
    return (
        failed.where(is_tried)
        .groupBy("consumer_group", "topic", minute)
        .agg(F.count("*").alias("deliveries"), F.count_if(F.col("outcome") == "dead letter").alias("consumed"))
    )


def most_repeated(failed: DataFrame, *, limit: int) -> DataFrame:
    """Return the messages with most failures, `limit` per group and topic: consumer_group, topic, message_id, failures."""
    keys = ["consumer_group", "topic"]
    rank = F.row_number().over(Window.partitionBy(*keys).orderBy(F.desc("failures"), "message_id"))
    return (
        failed.where(F.col("outcome").isin("retry", "dead letter"))
        .groupBy(*keys, "message_id")
        .agg(F.count("*").alias("failures"))
        .where(F.col("failures") > 1)
        .withColumn("rank", rank)
        .where(F.col("rank") <= limit)
        .select(*keys, "message_id", "failures")
    )

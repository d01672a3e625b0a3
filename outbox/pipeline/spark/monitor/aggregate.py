"""A micro-batch as bitmaps: what is to be added to what was seen before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.spark.transforms.numbers import BUCKET, HIGHEST


@dataclass(frozen=True)
class Change:
    """
    Rows of a micro-batch that are alike.

    Args:
        lane, bucket: None where the rows carry no number that a lane gives out.
        bits: which numbers of the bucket.
        n: how many rows.
        lowest, highest: numbers.
    """

    role: str
    consumer_group: str
    source: str
    topic: str
    lane: int | None
    bucket: int | None
    bits: bytes
    n: int
    lowest: int
    highest: int


def aggregate(changes: DataFrame) -> DataFrame:
    """Takes what `changes.CHANGES` names; gives the fields of `Change`."""
    is_number = F.col("lane").isNotNull() & F.col("number").between(1, HIGHEST)
    return (
        changes.withColumn("lane", F.when(is_number, F.col("lane")))
        .withColumn("bucket", F.when(is_number, F.expr(f"(number - 1) div {BUCKET}")))
        .withColumn("position", F.when(is_number, F.expr(f"(number - 1) % {BUCKET}")).otherwise(0))
        .groupBy("role", "consumer_group", "source", "topic", "lane", "bucket")
        .agg(
            F.bitmap_construct_agg("position").alias("bits"),
            F.count("*").alias("n"),
            F.coalesce(F.min("number"), F.lit(0)).alias("lowest"),
            F.coalesce(F.max("number"), F.lit(0)).alias("highest"),
        )
        .select("role", "consumer_group", "source", "topic", "lane", "bucket", "bits", "n", "lowest", "highest")
    )


def changes_of(rows: Iterable[Any]) -> list[Change]:
    """Take rows of `aggregate` off Spark."""
    return [Change(**{**row.asDict(), "bits": bytes(row.bits)}) for row in rows]

"""
Numbers as bitmaps: one bit per message, 32,768 numbers to a bucket.

Rows shrink to bitmaps before anything is shuffled, so a stage of ten million rows sends some hundred of them. One
aggregation over one packed key (lane, role, bucket) serves all stages: sorting by a single long is what Spark does fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

BUCKET = 32_768  # Source: Spark, bitmap_construct_agg: positions 0 to 32767, 4 KiB
ROLE_SHIFT = 34
STREAM_SHIFT = 44
HIGHEST = BUCKET << ROLE_SHIFT  # numbers from there on fit no bucket

STREAM_KEY = ("source", "topic", "lane")


def seen(frame: DataFrame, role: Column, no_number: int) -> DataFrame:
    """
    Give the numbered rows of a stage as numbers in a role; rows without a number or role are left out.

    Takes source, topic, lane, number, at. Gives source, topic, lane, number, role, micros.

    Args:
        no_number: the role of numbers that no lane gives out.
    """
    is_number = F.col("number").between(1, HIGHEST)
    return (
        frame.where(F.col("number").isNotNull())
        .select(
            *STREAM_KEY,
            "number",
            F.when(is_number | role.isNull(), role).otherwise(no_number).alias("role"),
            F.unix_micros("at").alias("micros"),
        )
        .where(F.col("role").isNotNull())
    )


def bitmaps(stages: Sequence[DataFrame], streams: DataFrame, unknown: int) -> DataFrame:
    """
    Give the bitmap of each (stream, role, bucket).

    Takes what `seen` gives. Gives stream, role, bucket (from 0), bits, n (rows), lowest, highest, earliest, latest (micros).

    Args:
        streams: source, topic, lane, stream: a lane's integer.
        unknown: the stream of lanes that are not in there.
    """
    is_number = F.col("number").between(1, HIGHEST)
    index = F.col("number") - 1
    bucket = F.when(is_number, F.shiftright(index, 15)).otherwise(0)
    stream = F.coalesce(F.col("stream"), F.lit(unknown)).cast("long")
    packed = F.shiftleft(stream, STREAM_SHIFT) + F.shiftleft(F.col("role").cast("long"), ROLE_SHIFT) + bucket
    parts = [
        stage.join(F.broadcast(streams), list(STREAM_KEY), "left").select(
            packed.alias("packed"),
            F.when(is_number, index.bitwiseAND(BUCKET - 1)).otherwise(0).alias("position"),
            "number",
            "micros",
        )
        for stage in stages
    ]
    return (
        reduce(DataFrame.unionAll, parts)
        .groupBy("packed")
        .agg(
            F.bitmap_construct_agg("position").alias("bits"),
            F.count("*").alias("n"),
            F.min("number").alias("lowest"),
            F.max("number").alias("highest"),
            F.min("micros").alias("earliest"),
            F.max("micros").alias("latest"),
        )
        .select(
            F.shiftright("packed", STREAM_SHIFT).cast("int").alias("stream"),
            F.shiftright("packed", ROLE_SHIFT).bitwiseAND((1 << (STREAM_SHIFT - ROLE_SHIFT)) - 1).cast("int").alias("role"),
            F.col("packed").bitwiseAND((1 << ROLE_SHIFT) - 1).alias("bucket"),
            "bits",
            "n",
            "lowest",
            "highest",
            "earliest",
            "latest",
        )
    )


def by_bucket(found: DataFrame) -> DataFrame:
    """Bring the roles of a bucket together. Takes what `bitmaps` gives. Gives stream, bucket, roles (a list of structs)."""
    role = F.struct("role", "bits", "n", "lowest", "highest", "earliest", "latest")
    return found.groupBy("stream", "bucket").agg(F.collect_list(role).alias("roles")).select("stream", "bucket", "roles")


def lanes_found(stages: Sequence[DataFrame]) -> DataFrame:
    """
    Give all lanes that rows name, whether anybody knows them or not.

    Takes what `seen` gives. Gives source, topic, lane, role, n, lowest, highest.
    """
    return (
        reduce(DataFrame.unionAll, stages)
        .groupBy(*STREAM_KEY, "role")
        .agg(F.count("*").alias("n"), F.min("number").alias("lowest"), F.max("number").alias("highest"))
        .select(*STREAM_KEY, "role", "n", "lowest", "highest")
    )

"""
Two sides that should hold the same keys, held to each other without moving the keys.

Both sides shrink to digests: per bucket of the key's hash the count and two xors of hashes. Only keys of buckets that
differ are looked at one by one. Two different sets look equal with a probability of about 2^-64.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

BUCKETS = 1 << 14


def _hashed(frame: DataFrame) -> DataFrame:
    hashed = F.xxhash64("key")
    return frame.select("key", hashed.alias("hash"), hashed.bitwiseAND(BUCKETS - 1).cast("int").alias("bucket"))


def _digest(frame: DataFrame) -> DataFrame:
    return frame.groupBy("bucket").agg(
        F.count("*").alias("n"), F.bit_xor("hash").alias("once"), F.bit_xor(F.xxhash64("hash")).alias("twice")
    )


def differences(left: DataFrame, right: DataFrame) -> DataFrame | None:
    """
    Give the keys that are not on both sides equally often; None where there are none.

    Takes a column `key` on each side. Gives key, left_n, right_n.
    """
    a, b = _hashed(left), _hashed(right)
    da, db = _digest(a).alias("a"), _digest(b).alias("b")
    is_equal = (
        F.col("a.n").eqNullSafe(F.col("b.n"))
        & F.col("a.once").eqNullSafe(F.col("b.once"))
        & F.col("a.twice").eqNullSafe(F.col("b.twice"))
    )
    rows = da.join(db, F.col("a.bucket") == F.col("b.bucket"), "full").where(~is_equal)
    dirty = [row.bucket for row in rows.select(F.coalesce("a.bucket", "b.bucket").alias("bucket")).collect()]
    if not dirty:
        return None
    spark = left.sparkSession
    buckets = F.broadcast(spark.createDataFrame([(bucket,) for bucket in dirty], "bucket int"))
    sides = a.withColumn("side", F.lit(1)).unionAll(b.withColumn("side", F.lit(0)))
    return (
        sides.join(buckets, "bucket")
        .groupBy("key")
        .agg(F.sum("side").alias("left_n"), F.sum(1 - F.col("side")).alias("right_n"))
        .where(F.col("left_n") != F.col("right_n"))
        .select("key", "left_n", "right_n")
    )

"""A short text that stands for a history: what was judged can be told from what was not, whoever read it and in which order."""

from __future__ import annotations

import hashlib
import json
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from outbox.pipeline.history import History
from outbox.pipeline.schemas import FRAMES

LOW_BITS = 0xFFFFFFFF  # so much of each hash is summed: the sum of 10^9 rows fits a bigint


def digest(history: History) -> str:
    """
    Give the digest of all rows: names, lanes, numbers, ids and states; times left out.

    Two histories that differ in a row have the same with a probability of about 2^-64. Rows that are there twice count
    twice: the sum sees what the xor does not.
    """
    rows = reduce(DataFrame.unionAll, [_of_frame(name, history.frames[name]) for name in FRAMES]).collect()
    text = json.dumps(sorted([row.name, row.n, row.once, row.total] for row in rows))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _of_frame(name: str, frame: DataFrame) -> DataFrame:
    columns = [column.name for column in FRAMES[name] if not isinstance(column.dataType, TimestampType)]
    hashed = frame.select(F.xxhash64(*columns).alias("hash"))
    return hashed.select(
        F.lit(name).alias("name"),
        F.count("*").alias("n"),
        F.coalesce(F.bit_xor("hash"), F.lit(0)).alias("once"),
        F.coalesce(F.sum(F.col("hash").bitwiseAND(LOW_BITS)), F.lit(0)).alias("total"),
    )

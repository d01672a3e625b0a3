"""A digest that identifies the history that was audited, independent of the reader and of the order of rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, TimestampType

from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.scan import CODED, scan
from outbox.pipeline.spark.schemas import FRAMES
from outbox.pipeline.spark.transforms.columns import coded, integers
from outbox.pipeline.spark.transforms.identity import Hashes, hashed, mixed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOW_BITS = np.uint64(0xFFFFFFFF)  # the part of each hash that is summed, so that the sum of 10^9 rows fits a bigint
NULL = np.uint64(0x9E3779B97F4A7C15)

COLUMNS = {
    name: tuple(column.name for column in schema if not isinstance(column.dataType, TimestampType))
    for name, schema in FRAMES.items()
}
TEXTS = {column.name for schema in FRAMES.values() for column in schema if isinstance(column.dataType, StringType)}
SUMS = pa.schema({"name": pa.string(), "n": pa.int64(), "once": pa.int64(), "total": pa.int64()})


def digest(spark: SparkSession, history: History) -> str:
    """
    Return the digest of all columns but times.

    Two histories that differ in one row have the same digest with a probability of about 2^-64. Repeated rows change the sum,
    though they cancel out in the xor.
    """
    parts = scan(spark, history, COLUMNS, _sums, SUMS).groupBy("name")
    rows = parts.agg(F.sum("n").alias("n"), F.bit_xor("once").alias("once"), F.sum("total").alias("total")).collect()
    text = json.dumps(sorted([row.name, row.n, row.once, row.total] for row in rows if row.n))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _sums(frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    n, once, total = 0, 0, 0
    for batch in batches:
        hashes = row_hashes(frame, batch)
        n += len(hashes)
        once ^= int(np.bitwise_xor.reduce(hashes))
        total += int((hashes & LOW_BITS).sum())
    signed = once - (1 << 64) if once >> 63 else once
    yield pa.RecordBatch.from_pydict({"name": [frame], "n": [n], "once": [signed], "total": [total]}, schema=SUMS)


def row_hashes(frame: str, batch: pa.RecordBatch) -> Hashes:
    """Return the hashes of a frame's rows."""
    found: Hashes = np.zeros(len(batch), np.uint64)
    for name in COLUMNS[frame]:
        found = mixed(found ^ _hashes(batch, name))
    return found


def _hashes(batch: pa.RecordBatch, name: str) -> Hashes:
    if name in CODED:
        return coded(batch, name).each(_of_text, np.uint64)
    column = batch.column(name)
    if name in TEXTS:
        return np.where(column.is_null().to_numpy(zero_copy_only=False), NULL, hashed(column.fill_null(""), np.uint64(0)))
    number, has_one = integers(batch, name)
    return np.where(has_one, mixed(number.astype(np.uint64)), NULL)


def _of_text(text: str | None) -> np.uint64:
    return NULL if text is None else hashed(pa.array([text]), np.uint64(0))[0]

"""
Hashes of rows: a digest that identifies a history, and digests that compare two sides that should have the same keys.

    left:  a b c d  \\  per bucket of the hash: rows and sum of hashes -> right - left is 0, or the one hash that differs,
    right: a b d    /  or several: then all keys of the bucket are compared

So keys need no shuffle. Two different sides look equal with a probability of about 2^-64 per bucket. Hashes of keys have a random
salt in each run, so that nobody can construct keys that collide.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, TimestampType

from outbox.pipeline.spark.columns import coded, integers
from outbox.pipeline.spark.history import FRAMES, History
from outbox.pipeline.spark.scan import CODED, scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Hashes: TypeAlias = "npt.NDArray[np.uint64]"

BUCKETS = 1 << 14
HALF = np.uint64(32)
LOW = np.uint64(0xFFFFFFFF)

# Masks of the bytes of a word that belong to a string with 0 to 8 bytes left.
MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)

DIGEST = pa.schema(
    {
        "pair": pa.int8(),
        "bucket": pa.int32(),
        "n": pa.int64(),
        "high": pa.int64(),
        "low": pa.int64(),
        "check": pa.int64(),
    }
)


def hashed(strings: pa.Array, seeds: Hashes | np.uint64) -> Hashes:
    """Return hashes of non-NULL strings, eight bytes at a time: multiply and shift, and a final mix as in splitmix64."""
    strings = strings.cast(pa.string())
    offsets = np.frombuffer(strings.buffers()[1], np.int32)[strings.offset : strings.offset + len(strings) + 1].astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    data = np.concatenate([np.frombuffer(strings.buffers()[2] or b"", np.uint8), np.zeros(8, np.uint8)])
    found = np.full(len(strings), seeds, np.uint64) ^ lengths.astype(np.uint64)
    shortest, longest = lengths.min(initial=1 << 31), lengths.max(initial=0)
    if shortest == longest:  # ids
        for at in range(0, longest, 8):
            words = np.ndarray(len(strings), "<u8", data, int(starts[0]) + at, (int(longest),))
            _stir(found, words if longest - at >= 8 else words & MASKS[longest - at])
        return mixed(found)
    words = np.ndarray(len(data) - 7, "<u8", data, 0, (1,))  # the word that begins at each byte
    for at in range(0, longest, 8):
        if shortest - at >= 8:
            _stir(found, words[starts + at])
            continue
        left = np.clip(lengths - at, 0, 8)
        stirred = found.copy()
        _stir(stirred, words[np.minimum(starts + at, len(words) - 1)] & MASKS[left])
        found = np.where(left > 0, stirred, found)
    return mixed(found)


def _stir(found: Hashes, words: Hashes) -> None:
    found ^= words
    found *= np.uint64(0x9E3779B97F4A7C15)
    found ^= found >> np.uint64(32)


def mixed(found: Hashes) -> Hashes:
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


def bucket_of(hashes: Hashes) -> npt.NDArray[np.int64]:
    return (hashes & np.uint64(BUCKETS - 1)).astype(np.int64)


def _check(hashes: Hashes) -> Hashes:
    return mixed(hashes + np.uint64(1)) & LOW


class Digest:
    """Accumulates the digests of one side of pairs of frames."""

    def __init__(self) -> None:
        self._found: dict[int, npt.NDArray[np.int64]] = {}

    def add(self, pair: int, sign: int, hashes: Hashes) -> None:
        """Add the keys of some rows. sign: -1 left, 1 right."""
        buckets = bucket_of(hashes)
        parts = hashes >> HALF, hashes & LOW, _check(hashes)
        # Sums of 32-bit halves of a batch are below 2^53, up to which floats are exact.
        sums = [np.bincount(buckets, part.astype(np.float64), BUCKETS).astype(np.int64) for part in parts]
        found = sign * np.stack([np.bincount(buckets, minlength=BUCKETS), *sums])
        self._found[pair] = self._found.get(pair, 0) + found

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield a row for each bucket that is not zero."""
        for pair, found in self._found.items():
            buckets = np.flatnonzero(found.any(axis=0))
            columns = [np.full(len(buckets), pair, np.int8), buckets.astype(np.int32), *found[:, buckets]]
            yield pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=DIGEST)


@dataclass(frozen=True)
class Candidates:
    """The candidates of a pair: the sorted hashes of keys that differ, and the buckets whose keys must all be compared."""

    hashes: Hashes
    buckets: npt.NDArray[np.bool_]

    @cached_property
    def near(self) -> npt.NDArray[np.bool_]:
        """Which buckets the hashes are in."""
        return _flags(bucket_of(self.hashes))

    def has(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Return which hashes are of keys that may differ."""
        bucket = bucket_of(hashes)
        found: npt.NDArray[np.bool_] = self.buckets[bucket]
        near = np.flatnonzero(self.near[bucket])
        place = np.searchsorted(self.hashes, hashes[near])
        found[near] |= self.hashes[np.minimum(place, len(self.hashes) - 1)] == hashes[near] if len(near) else False
        return found


def candidates(rows: Iterable[Any]) -> dict[int, Candidates]:
    """Return the candidates of each pair, from the sums of DIGEST's columns by pair and bucket."""
    hashes: dict[int, list[int]] = {}
    buckets: dict[int, list[int]] = {}
    for row in rows:
        one = (row.n * row.high << 32) + row.n * row.low
        if abs(row.n) == 1 and 0 <= one < 1 << 64 and _is_of(one, row.bucket, row.n * row.check):
            hashes.setdefault(row.pair, []).append(one)
        else:
            buckets.setdefault(row.pair, []).append(row.bucket)
    return {
        pair: Candidates(np.array(sorted(hashes.get(pair, [])), np.uint64), _flags(buckets.get(pair, [])))
        for pair in {*hashes, *buckets}
    }


def _is_of(one: int, bucket: int, check: int) -> bool:
    hashes = np.array([one], np.uint64)
    return bool(bucket_of(hashes)[0] == bucket and _check(hashes)[0] == check)


def _flags(buckets: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.zeros(BUCKETS, bool)
    found[np.asarray(buckets, np.int64)] = True
    return found


LOW_BITS = np.uint64(0xFFFFFFFF)  # the part of each hash that is summed, so that the sum of 10^9 rows fits a bigint
NULL = np.uint64(0x9E3779B97F4A7C15)

DIGESTED = {
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
    parts = scan(spark, history, DIGESTED, _sums, SUMS).groupBy("name")
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
    hashes: Hashes = np.zeros(len(batch), np.uint64)
    for name in DIGESTED[frame]:
        hashes = mixed(hashes ^ _hashes(batch, name))
    return hashes


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

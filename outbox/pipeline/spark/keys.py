"""
Compare by key: find business rows without a message, and message rows without a place in the outbox. And digest a history.

    pair     left                        right
    ABOUT    business row shop.order:7   message about shop.order:7      left only: LOST; right only: ORPHAN
    PLACE    message row 01a1…           ticket, delayed row or batch    LOST: no relay would send it (left only); its row is gone

Keys are hashed, and their hashes are divided into buckets. For each bucket, the number of rows and the sum of hashes on the left
are subtracted from those on the right. Both differences are 0 if the sides are equal. If one key is missing on the left, they are
1 and its hash; if one is missing on the right, both are negated. If several keys are missing, all hashes of the bucket are
compared.

So Spark never shuffles keys, and shuffles hashes only for buckets in which several keys differ. Two unequal sides look equal with
a probability of about 2^-64 per bucket. Each run hashes keys with a random salt, so keys that collide cannot be constructed.
`history.py` defines the frames from which the keys come.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, TimestampType

from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.cells import micros
from outbox.pipeline.spark.config import Business, PipelineConfig
from outbox.pipeline.spark.findings import (
    NO_MESSAGE,
    NO_ROW,
    ROW_GONE,
    SEVERAL_PLACES,
    STRANDED,
    Breach,
    FindingKind,
    Stage,
)
from outbox.pipeline.spark.history import FRAMES, History
from outbox.pipeline.spark.scan import DICTIONARY_COLUMNS, Ints, coded, collected, ddl, integers, micros_of, scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Hashes: TypeAlias = "npt.NDArray[np.uint64]"

BUCKETS = 1 << 14
HALF_BITS = np.uint64(32)
LOW_HALF = np.uint64(0xFFFFFFFF)

# remaining bytes of a string, 0 to 8 -> the mask of these bytes in a word
BYTE_MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)

# Sums of a pair and bucket, the right side minus the left one: the number of rows, the upper and the lower halves of their
# hashes, and their check values.
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
    """
    Return the hashes of strings, none of which is NULL. Their bytes are mixed in eight at a time; splitmix64's finalizer follows.
    """
    strings = strings.cast(pa.string())
    offsets = np.frombuffer(strings.buffers()[1], np.int32)[strings.offset : strings.offset + len(strings) + 1].astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    data = np.concatenate([np.frombuffer(strings.buffers()[2] or b"", np.uint8), np.zeros(8, np.uint8)])
    hashes = np.full(len(strings), seeds, np.uint64) ^ lengths.astype(np.uint64)
    shortest, longest = lengths.min(initial=1 << 31), lengths.max(initial=0)
    if shortest == longest:  # strings of equal length, such as ids
        for at in range(0, longest, 8):
            words = np.ndarray(len(strings), "<u8", data, int(starts[0]) + at, (int(longest),))
            _mix_in(hashes, words if longest - at >= 8 else words & BYTE_MASKS[longest - at])
        return finalized(hashes)
    words = np.ndarray(len(data) - 7, "<u8", data, 0, (1,))  # the word that begins at each byte
    for at in range(0, longest, 8):
        if shortest - at >= 8:
            _mix_in(hashes, words[starts + at])
            continue
        remaining = np.clip(lengths - at, 0, 8)
        updated = hashes.copy()
        _mix_in(updated, words[np.minimum(starts + at, len(words) - 1)] & BYTE_MASKS[remaining])
        hashes = np.where(remaining > 0, updated, hashes)
    return finalized(hashes)


def _mix_in(hashes: Hashes, words: Hashes) -> None:
    hashes ^= words
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(32)


def finalized(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def bucket_of(hashes: Hashes) -> npt.NDArray[np.int64]:
    return (hashes & np.uint64(BUCKETS - 1)).astype(np.int64)


def _check(hashes: Hashes) -> Hashes:
    """Return check values. A sum of hashes is a single hash only if its check value equals the sum of the check values."""
    return finalized(hashes + np.uint64(1)) & LOW_HALF


class Digest:
    """Accumulates, for each pair and bucket of hashes, the number of rows and the sums of their hashes."""

    def __init__(self) -> None:
        self._sums: dict[int, npt.NDArray[np.int64]] = {}

    def add(self, pair: int, sign: int, hashes: Hashes) -> None:
        """Add the keys of some rows. `sign` is LEFT or RIGHT."""
        buckets = bucket_of(hashes)
        parts = hashes >> HALF_BITS, hashes & LOW_HALF, _check(hashes)
        # `bincount` sums floats, which are exact up to 2^53. So it gets halves of 32 bits, whose sums in a batch are lower.
        sums = [np.bincount(buckets, part.astype(np.float64), BUCKETS).astype(np.int64) for part in parts]
        signed = sign * np.stack([np.bincount(buckets, minlength=BUCKETS), *sums])
        self._sums[pair] = self._sums.get(pair, 0) + signed

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield a row for each bucket whose sums are not all zero."""
        for pair, sums in self._sums.items():
            buckets = np.flatnonzero(sums.any(axis=0))
            columns = [np.full(len(buckets), pair, np.int8), buckets.astype(np.int32), *sums[:, buckets]]
            yield pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=DIGEST)


@dataclass(frozen=True)
class Candidates:
    """The sorted hashes of the keys of a pair that are not on both sides. The lowest bit of each is set, as in UNEQUAL."""

    hashes: Hashes

    @cached_property
    def in_bucket(self) -> npt.NDArray[np.bool_]:
        """For each bucket, whether one of the hashes is in it."""
        return _flags(bucket_of(self.hashes))

    def has(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Return for each hash whether it is one of them."""
        hashes = hashes | LAST_BIT
        is_candidate: npt.NDArray[np.bool_] = self.in_bucket[bucket_of(hashes)]
        to_look_up = np.flatnonzero(is_candidate)
        index = np.searchsorted(self.hashes, hashes[to_look_up])
        is_candidate[to_look_up] = self.hashes[np.minimum(index, len(self.hashes) - 1)] == hashes[to_look_up]
        return is_candidate


def candidates(rows: Iterable[Any]) -> tuple[dict[int, list[int]], dict[int, npt.NDArray[np.bool_]]]:
    """
    Return pair -> the hashes that are on one side only, and pair -> the buckets in which several keys differ.

    Args:
        rows: the sums of DIGEST's columns, by pair and bucket.
    """
    hashes: dict[int, list[int]] = defaultdict(list)
    buckets: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        single = (row.n * row.high << 32) + row.n * row.low
        if abs(row.n) == 1 and 0 <= single < 1 << 64 and _is_hash(single, row.bucket, row.n * row.check):
            hashes[row.pair].append(single)
        else:
            buckets[row.pair].append(row.bucket)
    return hashes, {pair: _flags(of_pair) for pair, of_pair in buckets.items()}


def _is_hash(sum_of_hashes: int, bucket: int, check: int) -> bool:
    """Return whether a sum is a single hash of this bucket, and not the sum of several."""
    hashes = np.array([sum_of_hashes], np.uint64)
    return bool(bucket_of(hashes)[0] == bucket and _check(hashes)[0] == check)


def _flags(buckets: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = np.zeros(BUCKETS, bool)
    flags[np.asarray(buckets, np.int64)] = True
    return flags


LAST_BIT = np.uint64(1)  # in a slice, the last bit of a hash is the side of its key: 1 is right
SLICE_BITS = 8  # hashes with the same highest bits are a slice, which one task compares

SLICE = pa.schema({"pair": pa.int8(), "slice": pa.int32(), "hashes": pa.binary()})
# hash: with the last bit set
UNEQUAL = pa.schema({"pair": pa.int8(), "hash": pa.int64()})


def sliced(pair: int, hashes: Hashes) -> pa.RecordBatch:
    """Return hashes as rows of SLICE."""
    hashes = np.sort(hashes)
    slices, starts = np.unique(hashes >> np.uint64(64 - SLICE_BITS), return_index=True)
    ends = [*starts[1:], len(hashes)]
    blobs = [hashes[start:end].tobytes() for start, end in zip(starts, ends, strict=False)]
    columns = [pa.array(np.full(len(blobs), pair, np.int8)), pa.array(slices.astype(np.int32)), pa.array(blobs, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=SLICE)


def unequal_hashes(table: pa.Table) -> pa.Table:  # Spark needs the annotations
    """Return the hashes of a slice that are not equally often on both sides, as rows of UNEQUAL."""
    hashes = np.sort(np.concatenate([np.frombuffer(blob, np.uint64) for blob in table["hashes"].to_pylist()]))
    starts = np.flatnonzero(np.diff(hashes | LAST_BIT, prepend=np.uint64(0)))
    surplus = np.add.reduceat((hashes & LAST_BIT).astype(np.int64) * 2 - 1, starts)
    unequal = (hashes | LAST_BIT)[starts[surplus != 0]].view(np.int64)
    return pa.table([np.full(len(unequal), table["pair"][0].as_py(), np.int8), unequal], schema=UNEQUAL)


NULL_HASH = np.uint64(0x9E3779B97F4A7C15)

DIGEST_COLUMNS = {
    name: tuple(column.name for column in schema if not isinstance(column.dataType, TimestampType))
    for name, schema in FRAMES.items()
}
TEXTS = {column.name for schema in FRAMES.values() for column in schema if isinstance(column.dataType, StringType)}
# The number of a frame's rows, the xor of their hashes, and the sum of the lower halves of their hashes.
SUMS = pa.schema({"name": pa.string(), "n": pa.int64(), "once": pa.int64(), "total": pa.int64()})


def digest(spark: SparkSession, history: History) -> str:
    """
    Return the digest of all columns of a history except times.

    Two histories that differ in one row have the same digest with a probability of about 2^-64. The digest contains both the xor
    and the sum of the rows' hashes, because two equal rows cancel out in the xor.
    """
    parts = scan(spark, history, DIGEST_COLUMNS, _sums, SUMS).groupBy("name")
    rows = parts.agg(F.sum("n").alias("n"), F.bit_xor("once").alias("once"), F.sum("total").alias("total")).collect()
    text = json.dumps(sorted([row.name, row.n, row.once, row.total] for row in rows if row.n))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _sums(frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    n, once, total = 0, 0, 0
    for batch in batches:
        hashes = row_hashes(frame, batch)
        n += len(hashes)
        once ^= int(np.bitwise_xor.reduce(hashes))
        total += int((hashes & LOW_HALF).sum())  # only the low half, so that the sum of 10^9 rows fits into a bigint
    signed = once - (1 << 64) if once >> 63 else once
    yield pa.RecordBatch.from_pydict({"name": [frame], "n": [n], "once": [signed], "total": [total]}, schema=SUMS)


def row_hashes(frame: str, batch: pa.RecordBatch) -> Hashes:
    """Return the hashes of a frame's rows."""
    hashes: Hashes = np.zeros(len(batch), np.uint64)
    for name in DIGEST_COLUMNS[frame]:
        hashes = finalized(hashes ^ _hashes(batch, name))
    return hashes


def _hashes(batch: pa.RecordBatch, name: str) -> Hashes:
    if name in DICTIONARY_COLUMNS:
        return coded(batch, name).each(_hash_of_text, np.uint64)
    column = batch.column(name)
    if name in TEXTS:
        return np.where(column.is_null().to_numpy(zero_copy_only=False), NULL_HASH, hashed(column.fill_null(""), np.uint64(0)))
    number, has_number = integers(batch, name)
    return np.where(has_number, finalized(number.astype(np.uint64)), NULL_HASH)


@lru_cache(1 << 16)
def _hash_of_text(text: str | None) -> np.uint64:
    return NULL_HASH if text is None else hashed(pa.array([text]), np.uint64(0))[0]


Entries: TypeAlias = "npt.NDArray[np.int32]"  # indexes in config.business; an index equal to its length means no entry

ABOUT, PLACE = 0, 1  # the pairs: business rows and their messages; message rows and their places in the outbox
LEFT, RIGHT = -1, 1

# pair -> frame -> the columns to read
COLUMNS: dict[int, dict[str, tuple[str, ...]]] = {
    ABOUT: {"business": ("subject", "about"), "messages": ("topic", "type", "about")},
    PLACE: {"messages": ("message_id", "topic"), "places": ("message_id", "topic")},
}

# left, right: 1 for the side of the row, and 0 for the other; at: microseconds since 1970.
CANDIDATE = pa.schema(
    {
        "pair": pa.int8(),
        "subject": pa.string(),
        "key": pa.string(),
        "left": pa.int64(),
        "right": pa.int64(),
        "topic": pa.string(),
        "at": pa.int64(),
    }
)


@dataclass(frozen=True)
class Side:
    """The rows of a batch that are on one side of a pair, with their entries in settings (empty for PLACE), keys and hashes."""

    pair: int
    sign: int
    batch: pa.RecordBatch
    subjects: pa.Array
    keys: pa.Array
    hashes: Hashes

    def rows(self, chosen: npt.NDArray[np.bool_]) -> pa.RecordBatch:
        """Return the chosen rows with the columns of CANDIDATE."""
        mask = pa.array(chosen)
        rows = self.batch.filter(mask)
        ones: Ints = np.ones(len(rows), np.int64)
        present = set(rows.schema.names)
        columns = [
            np.full(len(rows), self.pair, np.int8),
            self.subjects.filter(mask).cast(pa.string()),
            self.keys.filter(mask),
            *((ones, 0 * ones) if self.sign == LEFT else (0 * ones, ones)),
            rows.column("topic").cast(pa.string()) if "topic" in present else pa.nulls(len(rows), pa.string()),
            micros_of(rows, "at") if "at" in present else 0 * ones,
        ]
        return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=CANDIDATE)


@dataclass(frozen=True)
class Keys:
    """
    Determines sides and keys of the rows of a frame.

    Args:
        business: the entries in settings whose rows are compared.
        since_micros: ignore earlier business rows; None: ignore none.
        salt: the random salt of the hashes.
        pairs: the pairs to compare.
    """

    business: Sequence[Business]
    since_micros: int | None
    salt: int
    pairs: Collection[int] = (ABOUT, PLACE)

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return frame -> the columns to read."""
        columns_of: dict[str, tuple[str, ...]] = {}
        for pair in self.pairs:
            for frame, columns in COLUMNS[pair].items():
                at = ("at",) if self.since_micros is not None and frame != "places" else ()
                columns_of[frame] = tuple(dict.fromkeys((*columns_of.get(frame, ()), *columns, *at)))
        return columns_of

    def digest(self, frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the digests of some rows of a frame, as rows of DIGEST."""
        digest = Digest()
        for side in self._sides(frame, batches):
            digest.add(side.pair, side.sign, side.hashes)
        yield from digest.batches()

    def slices(
        self, buckets: Mapping[int, npt.NDArray[np.bool_]], frame: str, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the hashes that are in the given buckets of their pair, as rows of SLICE."""
        for side in self._sides(frame, batches):
            hashes = side.hashes[buckets[side.pair][bucket_of(side.hashes)]]
            yield sliced(side.pair, hashes | LAST_BIT if side.sign == RIGHT else hashes & ~LAST_BIT)

    def candidates(
        self, wanted: Mapping[int, Candidates], frame: str, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose hashes are wanted, with the columns of CANDIDATE."""
        for side in self._sides(frame, batches):
            if (chosen := wanted[side.pair].has(side.hashes)).any():
                yield side.rows(chosen)

    def _sides(self, frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[Side]:
        for batch in batches:
            if frame == "business":
                rows = batch
                if self.since_micros is not None:
                    rows = batch.filter(pa.array(micros_of(batch, "at", missing=-1) >= self.since_micros))
                yield self._about_side(LEFT, rows, rows.column("subject"))
            elif frame == "messages":
                if ABOUT in self.pairs:
                    yield self._about_side_of_messages(batch)
                if PLACE in self.pairs:
                    yield self._place_side(LEFT, batch)
            else:
                yield self._place_side(RIGHT, batch)

    def _about_side_of_messages(self, batch: pa.RecordBatch) -> Side:
        """Return the messages that belong to an entry by topic, type and `about`. Each message belongs to one entry at most."""
        topic, kind = coded(batch, "topic"), coded(batch, "type")
        about = batch.column("about")
        entry: Entries = np.full(len(batch), len(self.business), np.int32)
        for label in {label for rows in self.business for label in (rows.about, *rows.also)}:
            starts = pc.starts_with(about, f"{label}:").fill_null(False).to_numpy(zero_copy_only=False)
            entries = self._entries(label, topic.values, kind.values)[topic.codes, kind.codes]
            entry = np.minimum(entry, entries if starts.all() else np.where(starts, entries, len(self.business)))
            for index in {index for index, rows in enumerate(self.business) if label in rows.also}:
                key = pc.utf8_slice_codeunits(about, len(label))
                of_parent = pc.binary_join_element_wise(self.business[index].about, key, "")
                about = pc.if_else(pa.array(starts & (entry == index)), of_parent, about)
        if about is not batch.column("about"):
            batch = batch.set_column(batch.schema.get_field_index("about"), "about", about)
        if not (is_expected := entry < len(self.business)).all():
            columns = [name for name in batch.schema.names if name != "message_id"]  # the longest column, which is not needed
            batch, entry = batch.select(columns).filter(pa.array(is_expected)), entry[is_expected]
        return self._about_side(RIGHT, batch, pa.DictionaryArray.from_arrays(entry, [rows.name for rows in self.business]))

    def _entries(self, label: str, topics: list[str | None], kinds: list[str | None]) -> Entries:
        """Return for each topic and type the first entry whose model has a label, otherwise the first with such a child model."""
        entries: Entries = np.full((len(topics), len(kinds)), len(self.business), np.int32)
        for index, rows in sorted(enumerate(self.business), key=lambda entry: (entry[1].about == label, -entry[0])):
            if label in (rows.about, *rows.also) and rows.topic in topics:
                entries[topics.index(rows.topic), [kind == rows.type or not rows.type for kind in kinds]] = index
        return entries

    def _about_side(self, sign: int, batch: pa.RecordBatch, subjects: pa.Array) -> Side:
        subject = coded(pa.RecordBatch.from_arrays([subjects], ["subject"]), "subject")
        seeds = subject.each(lambda name: hashed(pa.array([name or ""]), np.uint64(self.salt))[0], np.uint64)
        keys = batch.column("about")
        return Side(ABOUT, sign, batch, subjects, keys, hashed(keys, seeds))

    def _place_side(self, sign: int, batch: pa.RecordBatch) -> Side:
        keys: Any = batch.column("message_id")
        no_subjects = pa.DictionaryArray.from_arrays(np.zeros(len(batch), np.int8), [""])
        return Side(PLACE, sign, batch, no_subjects, keys, hashed(keys, np.uint64(self.salt)))


# A business row and its message may be on different sides of `since`, so findings about rows from the first hour are left out.
EDGE = timedelta(hours=1)


def audit_keys(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """
    Compare business rows with the messages about them, and message rows with their places in the outbox.

    A message without a place is lost, because no relay would send it.

    Raises:
        HistoryError: an entry has no `AT`, so it is not known which of its rows were written since `config.since`.
    """
    if config.since and (without := [entry.name for entry in config.business if not entry.at]):
        raise HistoryError(
            f"Messages from before {config.since} are not in the history, and it is not known when the rows of "
            f'{", ".join(without)} were written. Set OUTBOX["PIPELINE"]["AUDIT"][...]["AT"] to a field with that time.'
        )
    pairs = (ABOUT, PLACE) if config.business else (PLACE,)
    keys = Keys(config.business, micros(config.since) if config.since else None, secrets.randbits(64), pairs)
    sums = [F.sum(name).alias(name) for name in ("n", "high", "low", "check")]
    digests = scan(spark, history, keys.columns(), keys.digest, DIGEST).groupBy("pair", "bucket").agg(*sums)
    hashes, buckets = candidates(collected(digests.where("n <> 0 OR high <> 0 OR low <> 0 OR check <> 0")))
    if buckets:
        unclear = replace(keys, pairs=tuple(buckets))
        slices = scan(spark, history, unclear.columns(), partial(unclear.slices, buckets), SLICE).groupBy("pair", "slice")
        for row in collected(slices.applyInArrow(unequal_hashes, ddl(UNEQUAL))):
            hashes[row.pair].append(row.hash % (1 << 64))
    if not hashes:
        return []
    wanted = {pair: Candidates(np.unique(np.array(of_pair, np.uint64) | LAST_BIT)) for pair, of_pair in hashes.items()}
    keys = replace(keys, pairs=tuple(wanted))
    sums = [F.sum(name).alias(name) for name in ("left", "right")]
    rows = collected(
        scan(spark, history, keys.columns(), partial(keys.candidates, wanted), CANDIDATE)
        .groupBy("pair", "subject", "key")
        .agg(*sums, F.min("topic").alias("topic"), F.max("at").alias("at"))
        .where(F.col("left") != F.col("right"))
    )
    audited_from = micros(config.since + EDGE) if config.since else 0
    return [
        *_business_findings(config, (row for row in rows if row.pair == ABOUT and row.at >= audited_from)),
        *by_topic(config, [(row.topic, *_place_problem(row), "", row.key) for row in rows if row.pair == PLACE]),
    ]


def _business_findings(config: PipelineConfig, candidates: Iterable[Any]) -> list[Breach]:
    topics = {entry.name: entry.topic for entry in config.business}
    rows: dict[tuple[str, FindingKind, str], list[str]] = {}
    for row in candidates:
        if row.left == 0:
            finding = (row.subject, FindingKind.ORPHAN, NO_ROW)
        elif row.right == 0:
            finding = (row.subject, FindingKind.LOST, NO_MESSAGE)
        else:
            finding = (row.subject, FindingKind.DUPLICATED, f"{row.right} messages for {row.left} rows")
        rows.setdefault(finding, []).append(row.key)
    return [
        Breach(
            *(kind, Stage.OUTBOX, topics[subject]),
            subject=subject,
            count=len(abouts),
            detail=detail,
            about=tuple(sorted(abouts)[: config.ids_per_finding]),
        )
        for (subject, kind, detail), abouts in sorted(rows.items())
    ]


def _place_problem(row: Any) -> tuple[FindingKind, Stage, str]:
    if row.right == 0:
        return FindingKind.LOST, Stage.OUTBOX, STRANDED
    if row.left == 0:
        return FindingKind.LOST, Stage.OUTBOX, ROW_GONE
    return FindingKind.DUPLICATED, Stage.OUTBOX, SEVERAL_PLACES


def by_topic(config: PipelineConfig, rows: list[tuple[str, FindingKind, Stage, str, str, str]]) -> list[Breach]:
    """
    Group rows of (topic, kind, stage, detail, group, message id) into findings whose messages have all but the id in common.
    """
    ids_of: dict[tuple[str, FindingKind, Stage, str, str], list[str]] = {}
    for topic, kind, stage, detail, group, message_id in rows:
        ids_of.setdefault((topic, kind, stage, detail, group), []).append(message_id)
    return [
        Breach(
            *(kind, stage, topic),
            group=group,
            count=len(ids),
            detail=detail,
            ids=tuple(sorted(ids)[: config.ids_per_finding]),
        )
        for (topic, kind, stage, detail, group), ids in sorted(ids_of.items())
    ]

"""
Which business rows have no message, and which message rows no place: compared by key, not by number.

    about     business row shop.order:7  <->  message about shop.order:7     one of them missing: lost, or orphan
    place     message row 01a1…          <->  ticket, delayed row or batch   none: no relay would send it
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from outbox.pipeline.spark.columns import Ints, coded, micros_of
from outbox.pipeline.spark.config import Business, PipelineConfig
from outbox.pipeline.spark.errors import HistoryError
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
from outbox.pipeline.spark.hashes import DIGEST, Candidates, Digest, Hashes, candidates, hashed
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.roles import micros
from outbox.pipeline.spark.scan import scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Entries: TypeAlias = "npt.NDArray[np.int32]"  # of config.business, by their indexes

ABOUT, PLACE = 0, 1  # pairs: business rows and their messages; message rows and their places
LEFT, RIGHT = -1, 1

# pair -> frame -> columns
COLUMNS: dict[int, dict[str, tuple[str, ...]]] = {
    ABOUT: {"business": ("subject", "about"), "messages": ("topic", "type", "about")},
    PLACE: {"messages": ("message_id", "topic"), "places": ("message_id", "topic")},
}

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
    """The rows of a batch on one side of a pair."""

    pair: int
    sign: int
    batch: pa.RecordBatch
    subjects: pa.Array
    keys: pa.Array
    hashes: Hashes

    def rows(self, chosen: npt.NDArray[np.bool_]) -> pa.RecordBatch:
        """Return some of the rows with the columns of CANDIDATE."""
        mask = pa.array(chosen)
        rows = self.batch.filter(mask)
        ones: Ints = np.ones(len(rows), np.int64)
        has = set(rows.schema.names)
        columns = [
            np.full(len(rows), self.pair, np.int8),
            self.subjects.filter(mask).cast(pa.string()),
            self.keys.filter(mask),
            *((ones, 0 * ones) if self.sign == LEFT else (0 * ones, ones)),
            rows.column("topic").cast(pa.string()) if "topic" in has else pa.nulls(len(rows), pa.string()),
            micros_of(rows, "at") if "at" in has else 0 * ones,
        ]
        return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=CANDIDATE)


@dataclass(frozen=True)
class Keys:
    """
    Determines the keys of a frame's rows.

    Args:
        since_micros: ignore earlier business rows; None: none.
        salt: the random salt of hashes.
        pairs: the pairs to compare.
    """

    business: Sequence[Business]
    since_micros: int | None
    salt: int
    pairs: Collection[int] = (ABOUT, PLACE)

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return the columns to read, by frame."""
        values: dict[str, tuple[str, ...]] = {}
        for pair in self.pairs:
            for frame, columns in COLUMNS[pair].items():
                at = ("at",) if self.since_micros is not None and frame != "places" else ()
                values[frame] = tuple(dict.fromkeys((*values.get(frame, ()), *columns, *at)))
        return values

    def digest(self, frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the digests of a part of a frame."""
        digest = Digest()
        for batch in batches:
            for side in self._sides(frame, batch):
                digest.add(side.pair, side.sign, side.hashes)
        yield from digest.batches()

    def candidates(
        self, wanted: Mapping[int, Candidates], frame: str, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that may differ according to the digests."""
        for batch in batches:
            for side in self._sides(frame, batch):
                if (chosen := wanted[side.pair].has(side.hashes)).any():
                    yield side.rows(chosen)

    def _sides(self, frame: str, batch: pa.RecordBatch) -> Iterator[Side]:
        if frame == "business":
            if self.since_micros is not None:
                batch = batch.filter(pa.array(micros_of(batch, "at", missing=-1) >= self.since_micros))
            yield self._about(LEFT, batch, batch.column("subject"))
        elif frame == "messages":
            if ABOUT in self.pairs:
                yield self._of_messages(batch)
            if PLACE in self.pairs:
                yield self._placed(LEFT, batch)
        else:
            yield self._placed(RIGHT, batch)

    def _of_messages(self, batch: pa.RecordBatch) -> Side:
        """Return the messages that belong to an entry, by topic, type and `about`."""
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
            columns = [name for name in batch.schema.names if name != "message_id"]  # not needed here, and the longest column
            batch, entry = batch.select(columns).filter(pa.array(is_expected)), entry[is_expected]
        return self._about(RIGHT, batch, pa.DictionaryArray.from_arrays(entry, [rows.name for rows in self.business]))

    def _entries(self, label: str, topics: list[str | None], kinds: list[str | None]) -> Entries:
        """Return for each topic and type the first entry with a label, else the first whose model has a child with it."""
        entries: Entries = np.full((len(topics), len(kinds)), len(self.business), np.int32)
        for index, one in sorted(enumerate(self.business), key=lambda entry: (entry[1].about == label, -entry[0])):
            if label in (one.about, *one.also) and one.topic in topics:
                entries[topics.index(one.topic), [kind == one.type or not one.type for kind in kinds]] = index
        return entries

    def _about(self, sign: int, batch: pa.RecordBatch, subjects: pa.Array) -> Side:
        subject = coded(pa.RecordBatch.from_arrays([subjects], ["subject"]), "subject")
        seeds = subject.each(lambda name: hashed(pa.array([name or ""]), np.uint64(self.salt))[0], np.uint64)
        keys = batch.column("about")
        return Side(ABOUT, sign, batch, subjects, keys, hashed(keys, seeds))

    def _placed(self, sign: int, batch: pa.RecordBatch) -> Side:
        keys: Any = batch.column("message_id")
        none = pa.DictionaryArray.from_arrays(np.zeros(len(batch), np.int8), [""])
        return Side(PLACE, sign, batch, none, keys, hashed(keys, np.uint64(self.salt)))


BORDER = timedelta(hours=1)


def audit_keys(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """
    Compare business rows with the messages about them, and message rows with their places: no relay would send a message without
    a place.

    Raises:
        HistoryError: it is not known which business rows belong to the history.
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
    wanted = candidates(digests.where("n <> 0 OR high <> 0 OR low <> 0 OR check <> 0").collect())
    if not wanted:
        return []
    keys = replace(keys, pairs=tuple(wanted))
    sums = [F.sum(name).alias(name) for name in ("left", "right")]
    rows = (
        scan(spark, history, keys.columns(), partial(keys.candidates, wanted), CANDIDATE)
        .groupBy("pair", "subject", "key")
        .agg(*sums, F.min("topic").alias("topic"), F.max("at").alias("at"))
        .where(F.col("left") != F.col("right"))
        .collect()
    )
    # Near the start of the history, one of a pair may be outside of it.
    border = micros(config.since + BORDER) if config.since else 0
    return [
        *_business_findings(config, (row for row in rows if row.pair == ABOUT and row.at >= border)),
        *by_topic(config, [(row.topic, *_place_of(row), "", row.key) for row in rows if row.pair == PLACE]),
    ]


def _business_findings(config: PipelineConfig, found: Iterable[Any]) -> list[Breach]:
    topics = {entry.name: entry.topic for entry in config.business}
    rows: dict[tuple[str, FindingKind, str], list[str]] = {}
    for row in found:
        if row.left == 0:
            what = (row.subject, FindingKind.ORPHAN, NO_ROW)
        elif row.right == 0:
            what = (row.subject, FindingKind.LOST, NO_MESSAGE)
        else:
            what = (row.subject, FindingKind.DUPLICATED, f"{row.right} messages for {row.left} rows")
        rows.setdefault(what, []).append(row.key)
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


def _place_of(row: Any) -> tuple[FindingKind, Stage, str]:
    if row.right == 0:
        return FindingKind.LOST, Stage.OUTBOX, STRANDED
    if row.left == 0:
        return FindingKind.LOST, Stage.OUTBOX, ROW_GONE
    return FindingKind.DUPLICATED, Stage.OUTBOX, SEVERAL_PLACES


def by_topic(config: PipelineConfig, rows: list[tuple[str, FindingKind, Stage, str, str, str]]) -> list[Breach]:
    """Group rows of (topic, kind, stage, detail, group, message id) into findings that have all but the id in common."""
    found: dict[tuple[str, FindingKind, Stage, str, str], list[str]] = {}
    for topic, kind, stage, detail, group, message_id in rows:
        found.setdefault((topic, kind, stage, detail, group), []).append(message_id)
    return [
        Breach(
            *(kind, stage, topic),
            group=group,
            count=len(ids),
            detail=detail,
            ids=tuple(sorted(ids)[: config.ids_per_finding]),
        )
        for (topic, kind, stage, detail, group), ids in sorted(found.items())
    ]

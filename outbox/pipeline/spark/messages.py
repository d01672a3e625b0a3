"""
Which messages the findings are about: the ids of numbers, and the reason of repeated numbers.

    lost at the broker, lane 1, numbers 3 to 4  -- rows of the frame places, in one pass -->  ids of numbers 3 and 4
    duplicated, lane 1, number 7                -- rows of the frame broker -->  one message twice, or two messages: RENUMBERED
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.pipeline.spark.columns import Bools, Ints, integers
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import Breach, FindingKind, Stage, merge
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.lanes import BUCKET, HIGHEST, LANE, LaneName, lanes_of, runs_of
from outbox.pipeline.spark.scan import ddl, scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


LANE_SHIFT = 49
BEFORE_ALL = np.iinfo(np.int64).min


@dataclass
class NumberRanges:
    """Ranges of numbers by lane."""

    _spans: dict[LaneName, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, lane: LaneName, first: int, last: int) -> None:
        self._spans[lane].append((first, last))

    def index(self) -> Index:
        """Return an index for look-ups of millions of numbers."""
        codes = {lane: code for code, lane in enumerate(self._spans)}
        spans = [(code, first, last) for lane, code in codes.items() for first, last in _merged(self._spans[lane])]
        starts = np.array([(code << LANE_SHIFT) + first - 1 for code, first, _ in spans], np.int64)
        ends = np.array([(code << LANE_SHIFT) + last - 1 for code, _, last in spans], np.int64)
        return Index(codes, starts, ends)


@dataclass(frozen=True)
class Index:
    """Sorted ranges; lane and number are packed into one integer."""

    codes: Mapping[LaneName, int]
    starts: Ints
    ends: Ints

    def has(self, lanes: Ints, names: list[LaneName], numbers: Ints) -> Bools:
        """Return for each row whether its number is in a range. lanes: index into `names`, for each row."""
        found: Bools = np.zeros(len(numbers), bool)
        codes = np.array([self.codes.get(name, -1) for name in names], np.int64)
        if not len(self.starts) or not len(numbers) or (codes < 0).all():
            return found
        packed = (codes << LANE_SHIFT)[lanes] + numbers - 1
        span = np.searchsorted(self.starts, packed, "right") - 1
        hits = np.flatnonzero(packed <= np.append(self.ends, BEFORE_ALL)[span])
        found[hits[(numbers[hits] >= 1) & (numbers[hits] <= HIGHEST)]] = True
        return found


def _merged(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges in order; overlapping ones are merged."""
    first, last = 0, -1
    for a, b in sorted(spans):
        if a > last:
            if last >= first:
                yield first, last
            first = a
        last = max(last, b)
    if last >= first:
        yield first, last


def repeats(rows: pa.Table, *, ids: int) -> Iterator[dict[str, Any]]:
    """
    Yield the repeated numbers of a bucket, by kind: one message several times, or several messages of one number.

    Takes consumer_group, number, message_id of one lane and bucket. Yields consumer_group, kind, first, last, numbers (how many
    of first to last are repeated), n (superfluous rows, or messages that share a number), ids of the first ones.
    """
    keys = rows.group_by(["consumer_group", "number"]).aggregate([("message_id", "count"), ("message_id", "distinct")])
    keys = keys.filter(pc.greater(keys["message_id_count"], 1)).sort_by(
        [("consumer_group", "ascending"), ("number", "ascending")]
    )
    for group in keys["consumer_group"].unique().to_pylist():
        of_group = keys.filter(pc.equal(keys["consumer_group"], group)).to_pylist()
        for kind in FindingKind.DUPLICATED, FindingKind.RENUMBERED:
            found = [one for one in of_group if (len(one["message_id_distinct"]) == 1) == (kind is FindingKind.DUPLICATED)]
            for first, last, of_span in _spans(found):
                yield {
                    "consumer_group": group,
                    "kind": kind.value,
                    "first": first,
                    "last": last,
                    "numbers": len(of_span),
                    "n": sum(_too_many(kind, row) for row in of_span),
                    "ids": [message_id for row in of_span[:ids] for message_id in sorted(row["message_id_distinct"])[:ids]],
                }


def _spans(found: list[dict[str, Any]]) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """Yield ranges of consecutive numbers with their rows; one range if they are scattered."""
    if not found:
        return
    before = (found[0]["number"] - 1) // BUCKET * BUCKET + 1
    there: Bools = np.zeros(BUCKET, bool)
    there[[row["number"] - before for row in found]] = True
    at = 0
    for first, last, many in runs_of(there):
        yield before + first, before + last, found[at : at + many]
        at += many


def _too_many(kind: FindingKind, row: dict[str, Any]) -> int:
    return int(row["message_id_count"] - 1 if kind is FindingKind.DUPLICATED else len(row["message_id_distinct"]))


NumberKey = tuple[str, str, int, int]

FRAME_OF = {Stage.OUTBOX: "places", Stage.BROKER: "broker", Stage.INBOX: "inbox"}
NAMELESS = (FindingKind.UNKNOWN_LANE, FindingKind.NO_NUMBER, FindingKind.CLOCK)
NAMED, REPEATED = 1, 2  # why a row is looked up; the sum means both

ROW = pa.schema(
    {
        "frame": pa.string(),
        "source": pa.string(),
        "topic": pa.string(),
        "lane": pa.int16(),
        "number": pa.int64(),
        "bucket": pa.int64(),
        "consumer_group": pa.string(),
        "message_id": pa.string(),
        "why": pa.int8(),
    }
)

FOUND = pa.schema(
    {
        "frame": pa.string(),
        "source": pa.string(),
        "topic": pa.string(),
        "lane": pa.int16(),
        "consumer_group": pa.string(),
        "kind": pa.string(),
        "first": pa.int64(),
        "last": pa.int64(),
        "numbers": pa.int64(),
        "n": pa.int64(),
        "ids": pa.list_(pa.string()),
    }
)


def with_messages(spark: SparkSession, config: PipelineConfig, history: History, findings: list[Breach]) -> list[Breach]:
    """
    Return the findings with message ids, at most `ids_per_finding` of each, in one pass over the frames concerned.

    Findings of repeated numbers become DUPLICATED (one message several times) or RENUMBERED (several messages of one number).
    """
    named, repeated = _wanted(config, findings)
    columns: dict[str, tuple[str, ...]] = {
        frame: (*LANE, "number", "message_id") for frame in FRAME_OF.values() if frame in named or frame in repeated
    }
    if not columns:
        return findings
    if "inbox" in columns:
        columns["inbox"] = (*columns["inbox"], "consumer_group")
    select = _row_filter(
        {frame: ranges.index() for frame, ranges in named.items()}, {frame: ranges.index() for frame, ranges in repeated.items()}
    )
    rows = scan(spark, history, columns, select, ROW)
    looked_up = rows.groupBy("frame", *LANE, "bucket").applyInArrow(_bucket_look_up(config.ids_per_finding), ddl(FOUND)).collect()
    dirty = {
        (finding.stage, finding.source, finding.topic, finding.lane, finding.group)
        for finding in findings
        if _is_repeated(finding)
    }
    found = [finding for finding in findings if not _is_repeated(finding)]
    found += [one for row in looked_up if row.kind and _where(one := _repeat(row)) in dirty]
    ids = {(row.source, row.topic, row.lane, row.first): row.ids[0] for row in looked_up if not row.kind}
    return [_with_ids(config, finding, ids) for finding in merge(found)]


def _is_repeated(one: Breach) -> bool:
    return one.kind is FindingKind.DUPLICATED and one.lane >= 0


def _where(one: Breach) -> tuple[Any, ...]:
    return one.stage, one.source, one.topic, one.lane, one.group


def _wanted(config: PipelineConfig, findings: Iterable[Breach]) -> tuple[dict[str, NumberRanges], dict[str, NumberRanges]]:
    """Return the numbers to look up, by frame: those whose ids are wanted, and repeated ones."""
    named: dict[str, NumberRanges] = {}
    repeated: dict[str, NumberRanges] = {}
    for finding in findings:
        lane = (finding.source, finding.topic, finding.lane)
        if _is_repeated(finding):
            repeated.setdefault(FRAME_OF[finding.stage], NumberRanges()).add(lane, finding.first, finding.last)
        elif not (
            finding.lane < 0 or finding.kind in NAMELESS or (finding.kind is FindingKind.LOST and finding.stage is Stage.OUTBOX)
        ):
            for frame in _where_to_look(finding):
                named.setdefault(frame, NumberRanges()).add(
                    lane, finding.first, min(finding.last, finding.first + config.ids_per_finding - 1)
                )
    return named, repeated


def _where_to_look(one: Breach) -> tuple[str, ...]:
    if one.kind is FindingKind.ORPHAN:
        return (FRAME_OF[one.stage],)
    return ("places", "broker") if one.kind is FindingKind.BEYOND_LAST or one.stage is Stage.INBOX else ("places",)


def _row_filter(named: Mapping[str, Index], repeated: Mapping[str, Index]) -> Any:
    def select(frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            number, _ = integers(batch, "number")
            lanes, names = lanes_of(batch)
            why: Any = np.zeros(len(number), np.int8)
            for index, reason in (named.get(frame), NAMED), (repeated.get(frame), REPEATED):
                if index is not None:
                    why += np.where(index.has(lanes, names, number), reason, 0).astype(np.int8)
            if why.any():
                yield _chosen(frame, batch, why)

    return select


def _chosen(frame: str, batch: pa.RecordBatch, why: Any) -> pa.RecordBatch:
    rows = batch.filter(pa.array(why > 0))
    number, _ = integers(rows, "number")
    group = rows.column("consumer_group").cast(pa.string()) if frame == "inbox" else pa.array([""] * len(number))
    lane = [rows.column("source").cast(pa.string()), rows.column("topic").cast(pa.string()), rows.column("lane")]
    bucket = pa.array((number - 1) // BUCKET)
    columns = [pa.array([frame] * len(number)), *lane, pa.array(number), bucket, group, rows.column("message_id")]
    return pa.RecordBatch.from_arrays([*columns, pa.array(why[why > 0])], schema=ROW)


def _bucket_look_up(ids: int) -> Any:
    """Return a function that returns the message of each wanted number in a bucket, and its repeated numbers."""

    def look_up(table: pa.Table) -> pa.Table:  # Spark needs the annotations
        why = table["why"].to_numpy()
        place = {name: table[name][0].as_py() for name in ("frame", *LANE)}
        found = [{**place, **repeat} for repeat in repeats(table.filter(pa.array(why >= REPEATED)), ids=ids)]
        for row in table.filter(pa.array(why % REPEATED == NAMED)).select(["number", "message_id"]).to_pylist():
            found.append({**place, "kind": "", "first": row["number"], "ids": [row["message_id"]]})
        return pa.Table.from_pylist(found, FOUND)

    return look_up


def _repeat(row: Any) -> Breach:
    stage = next(stage for stage, frame in FRAME_OF.items() if frame == row.frame)
    span = row.last - row.first + 1
    return Breach(
        FindingKind(row.kind),
        stage,
        *(row.topic, row.source, row.lane, row.consumer_group),
        first=row.first,
        last=row.last,
        count=row.n,
        detail=f"{row.numbers} of these {span} numbers" if row.numbers < span else "",
        ids=tuple(row.ids),
    )


def _with_ids(config: PipelineConfig, one: Breach, ids: Mapping[NumberKey, str]) -> Breach:
    if one.lane < 0 or one.ids or one.kind in NAMELESS:
        return one
    span: Sequence[int] = range(one.first, min(one.last, one.first + config.ids_per_finding - 1) + 1)
    found = [ids[key] for number in span if (key := (one.source, one.topic, one.lane, number)) in ids]
    return replace(one, ids=tuple(found))

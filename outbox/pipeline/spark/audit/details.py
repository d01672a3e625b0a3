"""Look up the messages of findings: ids of numbers, and the reason of repeated numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import Breach, FindingKind, Stage, merge
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.scan import ddl, scan
from outbox.pipeline.spark.transforms.columns import integers
from outbox.pipeline.spark.transforms.lookup import Index, NumberRanges, repeats
from outbox.pipeline.spark.transforms.numbers import BUCKET, LANE, lanes_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
        {frame: one.index() for frame, one in named.items()}, {frame: one.index() for frame, one in repeated.items()}
    )
    rows = scan(spark, history, columns, select, ROW)
    looked_up = rows.groupBy("frame", *LANE, "bucket").applyInArrow(_bucket_look_up(config.ids_per_finding), ddl(FOUND)).collect()
    dirty = {(one.stage, one.source, one.topic, one.lane, one.group) for one in findings if _is_repeated(one)}
    found = [one for one in findings if not _is_repeated(one)]
    found += [one for row in looked_up if row.kind and _where(one := _repeat(row)) in dirty]
    ids = {(row.source, row.topic, row.lane, row.first): row.ids[0] for row in looked_up if not row.kind}
    return [_with_ids(config, one, ids) for one in merge(found)]


def _is_repeated(one: Breach) -> bool:
    return one.kind is FindingKind.DUPLICATED and one.lane >= 0


def _where(one: Breach) -> tuple[Any, ...]:
    return one.stage, one.source, one.topic, one.lane, one.group


def _wanted(config: PipelineConfig, findings: Iterable[Breach]) -> tuple[dict[str, NumberRanges], dict[str, NumberRanges]]:
    """Return the numbers to look up, by frame: those whose ids are wanted, and repeated ones."""
    named: dict[str, NumberRanges] = {}
    repeated: dict[str, NumberRanges] = {}
    for one in findings:
        lane = (one.source, one.topic, one.lane)
        if _is_repeated(one):
            repeated.setdefault(FRAME_OF[one.stage], NumberRanges()).add(lane, one.first, one.last)
        elif not (one.lane < 0 or one.kind in NAMELESS or (one.kind is FindingKind.LOST and one.stage is Stage.OUTBOX)):
            for frame in _where_to_look(one):
                named.setdefault(frame, NumberRanges()).add(
                    lane, one.first, min(one.last, one.first + config.ids_per_finding - 1)
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
    def look_up(table: pa.Table) -> pa.Table:  # Spark needs the annotations
        return _look_up_bucket(table, ids)

    return look_up


def _look_up_bucket(table: pa.Table, ids: int) -> pa.Table:
    """Return the message of each wanted number in a bucket, and its repeated numbers."""
    why = table["why"].to_numpy()
    place = {name: table[name][0].as_py() for name in ("frame", *LANE)}
    found = [{**place, **one} for one in repeats(table.filter(pa.array(why >= REPEATED)), ids=ids)]
    for row in table.filter(pa.array(why % REPEATED == NAMED)).select(["number", "message_id"]).to_pylist():
        found.append({**place, "kind": "", "first": row["number"], "ids": [row["message_id"]]})
    return pa.Table.from_pylist(found, FOUND)


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

"""Numbered messages: all lanes, bucket by bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame

from outbox.pipeline.audit.recorded import micros, roles_of, unread
from outbox.pipeline.config import Group, PipelineConfig
from outbox.pipeline.errors import HistoryError
from outbox.pipeline.findings import NO_SUCH_LANE, Finding, Kind, Stage, merge
from outbox.pipeline.history import History, Mark, Recorded
from outbox.pipeline.transforms import numbers
from outbox.pipeline.transforms.judge import BUCKET, HANDLED_BY, Lane, Role, judge
from outbox.pipeline.transforms.roles import MAX_GROUPS, Seen

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERDICT = "stream int, kind string, stage string, what string, first bigint, last bigint, n bigint"
IS_SEEN = "bucket"  # a verdict of this kind only says that the bucket was there


@dataclass
class Result:
    """
    Args:
        findings: merged; without ids. DUPLICATED stands for a bucket, not yet for numbers.
        counts: topic -> what -> how many.
        foreign: rows of other databases' messages, which are not judged.
    """

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    foreign: int = 0


def audit_lanes(spark: SparkSession, config: PipelineConfig, history: History) -> Result:
    """Hold all stages of all lanes to each other."""
    groups = _groups(config)
    stages = _stages(config, history, groups)
    marks = history.marks_list()
    result = Result()
    rows = _verdict(spark, config, history, stages, marks, groups)
    if any(row.stream == len(marks) for row in rows):
        marks = [*marks, *_unknown_lanes(stages, history, marks, result)]
        rows = _verdict(spark, config, history, stages, marks, groups)
    _read(result, config, history, marks, rows)
    return result


def _groups(config: PipelineConfig) -> Sequence[Group]:
    if len(config.groups) > MAX_GROUPS:
        raise HistoryError(f"{len(config.groups)} consumer groups are more than one audit takes ({MAX_GROUPS}). Do it in parts.")
    return config.groups


def _stages(config: PipelineConfig, history: History, groups: Sequence[Group]) -> list[DataFrame]:
    roles = roles_of(config, history)
    found = [
        numbers.seen(history.places, roles.of_places(), Seen.NO_NUMBER_PLACE),
        numbers.seen(history.broker, roles.of_broker(), Seen.NO_NUMBER_BROKER),
        numbers.seen(history.inbox, roles.of_inbox(), Seen.NO_NUMBER_INBOX),
    ]
    if not history.attempts.isEmpty():
        found.append(numbers.seen(history.attempts, roles.of_attempts(), Seen.NO_NUMBER_INBOX))
    found += [numbers.seen(history.broker, role, Seen.NO_NUMBER_BROKER) for role in roles.of_filtered()]
    return found


def _verdict(
    spark: SparkSession,
    config: PipelineConfig,
    history: History,
    stages: list[DataFrame],
    marks: Sequence[Mark],
    groups: Sequence[Group],
) -> list[Any]:
    streams = spark.createDataFrame(
        [(mark.source, mark.topic, mark.lane, stream) for stream, mark in enumerate(marks)],
        "source string, topic string, lane smallint, stream int",
    )
    lanes = {stream: _lane(config, mark, groups) for stream, mark in enumerate(marks)}
    latest = micros(history.as_of + timedelta(seconds=config.clock_tolerance_seconds))
    buckets = numbers.by_bucket(numbers.bitmaps(stages, streams, len(marks)))
    return buckets.mapInArrow(_judge_batches(lanes, latest), VERDICT).collect()


def _lane(config: PipelineConfig, mark: Mark, groups: Sequence[Group]) -> Lane:
    reading = {index: group.name for index, group in enumerate(groups) if mark.topic in group.topics}
    return Lane(mark.first, mark.last, mark.topic in config.seen_topics, reading)


def _judge_batches(lanes: Mapping[int, Lane], latest: int) -> Any:
    def judge_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [row for bucket in batch.to_pylist() for row in _judge_bucket(lanes, latest, **bucket)]
            columns: list[Any] = list(zip(*rows, strict=True)) or [[]] * 7
            types = [pa.int32(), pa.string(), pa.string(), pa.string(), pa.int64(), pa.int64(), pa.int64()]
            names = ["stream", "kind", "stage", "what", "first", "last", "n"]
            arrays = [pa.array(values, type=kind) for values, kind in zip(columns, types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, names=names)

    return judge_batches


def _judge_bucket(
    lanes: Mapping[int, Lane], latest: int, stream: int, bucket: int, roles: list[dict[str, Any]]
) -> Iterator[tuple[Any, ...]]:
    yield stream, IS_SEEN, "", "", bucket, bucket, sum(role["n"] for role in roles)
    if stream in lanes:
        found = {role["role"]: Role(role["bits"], role["n"], role["lowest"], role["highest"], role["latest"]) for role in roles}
        for one in judge(lanes[stream], bucket, found, latest):
            yield stream, one.kind, one.stage, one.what, one.first, one.last, one.count


def _unknown_lanes(stages: list[DataFrame], history: History, marks: Sequence[Mark], result: Result) -> list[Mark]:
    """Find the lanes without a mark: those of ours are findings, and judged as far as they are seen."""
    known = {(mark.source, mark.topic, mark.lane) for mark in marks}
    found: dict[tuple[str, str, int], list[Any]] = defaultdict(list)
    for row in numbers.lanes_found(stages).collect():
        if (row.source, row.topic, row.lane) not in known:
            found[row.source, row.topic, row.lane].append(row)
    unknown = []
    for (source, topic, lane), rows in found.items():
        if source not in history.sources:
            result.foreign += sum(row.n for row in rows)
            continue
        last = max(row.highest for row in rows)
        count = max(row.n for row in rows)
        first = min(row.lowest for row in rows)
        result.findings.append(
            Finding(
                Kind.UNKNOWN_LANE, Stage.OUTBOX, topic, source, lane, first=first, last=last, count=count, detail=NO_SUCH_LANE
            )
        )
        unknown.append(Mark(source, topic, lane, 1, last))
    return unknown


def _read(result: Result, config: PipelineConfig, history: History, marks: Sequence[Mark], rows: list[Any]) -> None:
    counts: dict[str, dict[str, int]] = {mark.topic: {} for mark in marks}
    buckets: dict[int, set[int]] = {stream: set() for stream in range(len(marks))}
    findings = []
    for row in rows:
        if row.stream not in buckets:
            continue
        mark = marks[row.stream]
        if row.kind == IS_SEEN:
            buckets[row.stream].add(row.first)
        elif row.kind is None:
            counts[mark.topic][row.what] = counts[mark.topic].get(row.what, 0) + row.n
        else:
            findings.append(_finding(mark, row, history.recorded.get(mark.topic)))
    for stream, mark in enumerate(marks):
        counts[mark.topic]["given out"] = counts[mark.topic].get("given out", 0) + max(0, mark.last - mark.first + 1)
        findings += _absent_buckets(mark, buckets[stream])
    result.counts = counts
    result.findings += _of_groups_that_began_late(config, marks, rows, merge(findings))


def _finding(mark: Mark, row: Any, recorded: Recorded | None) -> Finding:
    group = row.what if row.stage == Stage.INBOX else ""
    span = row.last - row.first + 1
    detail = f"{row.n} of these {span} numbers" if row.kind not in (Kind.DUPLICATED, Kind.CLOCK) and row.n < span else ""
    if row.kind == Kind.LATE and row.stage == Stage.BROKER:
        detail = unread(recorded)
    return Finding(
        Kind(row.kind), Stage(row.stage), mark.topic, mark.source, mark.lane, group, "", row.first, row.last, row.n, detail
    )


def _absent_buckets(mark: Mark, present: set[int]) -> Iterator[Finding]:
    """Numbers that were given out, in buckets of which no stage has anything. Walks what is there, not what should be."""
    first, end = mark.first, mark.last + 1
    for bucket in [*sorted(present), (end + BUCKET - 2) // BUCKET]:
        gap_end = min(bucket * BUCKET + 1, end)
        if gap_end > first:
            yield Finding(
                Kind.LOST,
                Stage.OUTBOX,
                mark.topic,
                mark.source,
                mark.lane,
                first=first,
                last=gap_end - 1,
                count=gap_end - first,
            )
        first = max(first, (bucket + 1) * BUCKET + 1)


def _of_groups_that_began_late(
    config: PipelineConfig, marks: Sequence[Mark], rows: list[Any], findings: list[Finding]
) -> Iterator[Finding]:
    """Leave out what was there before a group began, where it began behind it; give all other findings."""
    late = {group.name for group in config.groups if not group.is_from_start}
    begin: dict[tuple[Mark, str], int] = {}
    for row in rows:
        if row.kind is None and row.what.startswith(HANDLED_BY) and row.n:
            lane = marks[row.stream], row.what.removeprefix(HANDLED_BY)
            begin[lane] = min(row.first, begin.get(lane, row.first))
    for one in findings:
        first_seen = next((n for (mark, group), n in begin.items() if group == one.group and _is_of(mark, one)), None)
        if one.group not in late or one.kind is not Kind.LOST or (first_seen is not None and one.first >= first_seen):
            yield one


def _is_of(mark: Mark, one: Finding) -> bool:
    return (mark.source, mark.topic, mark.lane) == (one.source, one.topic, one.lane)

"""Checks by number: all lanes, bucket by bucket."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.spark.audit.recorded import micros, roles_of, unread
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import NO_SUCH_LANE, NUMBERS_WITHOUT_LANE, Breach, FindingKind, Stage, merge
from outbox.pipeline.spark.history import History, Mark, Recorded
from outbox.pipeline.spark.scan import ddl, scan
from outbox.pipeline.spark.transforms import numbers
from outbox.pipeline.spark.transforms.columns import integers, micros_of
from outbox.pipeline.spark.transforms.judge import HANDLED_BY, ExpectedLane, judge, roles_in
from outbox.pipeline.spark.transforms.roles import COLUMNS, NONE, Roles, Seen

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESULT = pa.schema(
    {
        "source": pa.string(),
        "topic": pa.string(),
        "lane": pa.int16(),
        "kind": pa.string(),
        "stage": pa.string(),
        "what": pa.string(),
        "first": pa.int64(),
        "last": pa.int64(),
        "n": pa.int64(),
    }
)
IS_SEEN = "bucket"  # a result of this kind says only that the bucket has rows
IS_UNKNOWN = "unknown"  # the lane has no mark; `what` is a role

NO_NUMBER = {
    "places": Seen.NO_NUMBER_PLACE,
    "broker": Seen.NO_NUMBER_BROKER,
    "inbox": Seen.NO_NUMBER_INBOX,
    "failed_deliveries": Seen.NO_NUMBER_INBOX,
}


@dataclass
class Result:
    """
    Args:
        findings: merged; without ids. DUPLICATED means a repeated number, whatever its messages are.
        counts: topic -> name of the count -> number of messages.
        foreign: rows of other databases' messages, which are not audited.
    """

    findings: list[Breach] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    foreign: int = 0


def audit_lanes(spark: SparkSession, config: PipelineConfig, history: History) -> Result:
    """Compare all stages of all lanes."""
    marks = history.marks_list()
    result = Result()
    rows = _judge_lanes(spark, config, history, marks)
    if unknown := _unknown_lanes(history, rows, result):
        marks = [*marks, *unknown]
        rows = _judge_lanes(spark, config, history, marks)
    _collect(result, config, history, marks, rows)
    return result


def _judge_lanes(spark: SparkSession, config: PipelineConfig, history: History, marks: Sequence[Mark]) -> list[Any]:
    lanes: dict[numbers.LaneName, ExpectedLane] = {(mark.source, mark.topic, mark.lane): _lane(config, mark) for mark in marks}
    bucket = [*numbers.LANE, "bucket"]
    cell = F.struct(*(name for name in numbers.CELL.names if name not in bucket))
    by_bucket = cells(spark, config, history).groupBy(*bucket).agg(F.collect_list(cell).alias("cells"))
    return by_bucket.mapInArrow(_judge_batches(lanes), ddl(RESULT)).collect()


def cells(spark: SparkSession, config: PipelineConfig, history: History) -> DataFrame:
    """Return the cells of all stages, as defined in `numbers.CELL`."""
    latest = micros(history.as_of + timedelta(seconds=config.clock_tolerance_seconds))
    columns = {name: tuple(dict.fromkeys((*numbers.LANE, "number", *wanted))) for name, wanted in COLUMNS.items()}
    return scan(spark, history, columns, _summarize(roles_of(config, history), latest), numbers.CELL)


def _summarize(roles: Roles, latest: int) -> Any:
    def summarize(frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = numbers.Cells(NO_NUMBER[frame])
        for batch in batches:
            number, has_number = integers(batch, "number")
            lane, names = numbers.lanes_of(batch)
            future = micros_of(batch, "at") > latest
            for role in roles.of(frame, batch):
                counts = has_number & (role != NONE)
                rows = slice(None) if counts.all() else counts
                found.add(lane[rows], names, role[rows], number[rows], future[rows])
        yield from found.batches()

    return summarize


def _lane(config: PipelineConfig, mark: Mark) -> ExpectedLane:
    reading = {index: group.name for index, group in enumerate(config.groups) if mark.topic in group.topics}
    return ExpectedLane(mark.first, mark.last, mark.topic in config.seen_topics, reading)


def _judge_batches(lanes: Mapping[numbers.LaneName, ExpectedLane]) -> Any:
    def judge_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [row for bucket in batch.to_pylist() for row in _judge_bucket(lanes, **bucket)]
            columns: list[Any] = list(zip(*rows, strict=True)) or [[]] * len(RESULT)
            arrays = [pa.array(values, type=column.type) for values, column in zip(columns, RESULT, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=RESULT)

    return judge_batches


def _judge_bucket(
    lanes: Mapping[numbers.LaneName, ExpectedLane], source: str, topic: str, lane: int, bucket: int, cells: list[dict[str, Any]]
) -> Iterator[tuple[Any, ...]]:
    name = source, topic, lane
    if name not in lanes:
        for cell in cells:
            yield *name, IS_UNKNOWN, "", str(cell["role"]), cell["lowest"], cell["highest"], cell["n"]
        return
    yield *name, IS_SEEN, "", "", bucket, bucket, sum(cell["n"] for cell in cells)
    for one in judge(lanes[name], bucket, roles_in(cells)):
        yield *name, one.kind, one.stage, one.what, one.first, one.last, one.count


def _unknown_lanes(history: History, rows: list[Any], result: Result) -> list[Mark]:
    """Return marks for the lanes without one. Those of this database are findings, and audited up to their highest number."""
    found: dict[tuple[str, str, int | None], list[Any]] = defaultdict(list)
    for row in rows:
        if row.kind == IS_UNKNOWN:
            found[row.source, row.topic, row.lane].append(row)
    unknown = []
    for (source, topic, lane), rows_of_lane in found.items():
        by_role: Counter[str] = Counter()
        for row in rows_of_lane:
            by_role[row.what] += row.n
        if source not in history.sources:
            result.foreign += by_role.total()
            continue
        if lane is None:
            many = max(by_role.values())
            found_nowhere = Breach(FindingKind.UNKNOWN_LANE, Stage.OUTBOX, topic, source, count=many, detail=NUMBERS_WITHOUT_LANE)
            result.findings.append(found_nowhere)
            continue
        first, last = min(row.first for row in rows_of_lane), max(row.last for row in rows_of_lane)
        span = {"first": first, "last": last, "count": max(by_role.values()), "detail": NO_SUCH_LANE}
        result.findings.append(Breach(FindingKind.UNKNOWN_LANE, Stage.OUTBOX, topic, source, lane, **span))
        unknown.append(Mark(source, topic, lane, 1, last))
    return unknown


def _collect(result: Result, config: PipelineConfig, history: History, marks: Sequence[Mark], rows: list[Any]) -> None:
    by_lane = {(mark.source, mark.topic, mark.lane): mark for mark in marks}
    counts: dict[str, dict[str, int]] = {mark.topic: {} for mark in marks}
    buckets: dict[Mark, set[int]] = {mark: set() for mark in marks}
    findings = []
    for row in rows:
        if row.kind == IS_UNKNOWN:
            continue
        mark = by_lane[row.source, row.topic, row.lane]
        if row.kind == IS_SEEN:
            buckets[mark].add(row.first)
        elif row.kind is None:
            counts[mark.topic][row.what] = counts[mark.topic].get(row.what, 0) + row.n
        else:
            findings.append(_finding(mark, row, history.recorded.get(mark.topic)))
    for mark in marks:
        counts[mark.topic]["assigned"] = counts[mark.topic].get("assigned", 0) + max(0, mark.last - mark.first + 1)
        findings += _absent_buckets(mark, buckets[mark])
    result.counts = counts
    result.findings += _of_groups_that_began_late(config, rows, merge(findings))


def _finding(mark: Mark, row: Any, recorded: Recorded | None) -> Breach:
    group = row.what if row.stage == Stage.INBOX else ""
    span = row.last - row.first + 1
    detail = (
        f"{row.n} of these {span} numbers" if row.kind not in (FindingKind.DUPLICATED, FindingKind.CLOCK) and row.n < span else ""
    )
    if row.kind == FindingKind.LATE and row.stage == Stage.BROKER:
        detail = unread(recorded)
    return Breach(
        FindingKind(row.kind), Stage(row.stage), mark.topic, mark.source, mark.lane, group, "", row.first, row.last, row.n, detail
    )


def _absent_buckets(mark: Mark, present: set[int]) -> Iterator[Breach]:
    """Yield findings for assigned numbers in buckets without any row. Iterates over existing buckets, not over missing ones."""
    first, end = mark.first, mark.last + 1
    for bucket in [*sorted(present), (end + numbers.BUCKET - 2) // numbers.BUCKET]:
        gap_end = min(bucket * numbers.BUCKET + 1, end)
        if gap_end > first:
            yield Breach(
                FindingKind.LOST,
                Stage.OUTBOX,
                mark.topic,
                mark.source,
                mark.lane,
                first=first,
                last=gap_end - 1,
                count=gap_end - first,
            )
        first = max(first, (bucket + 1) * numbers.BUCKET + 1)


def _of_groups_that_began_late(config: PipelineConfig, rows: list[Any], findings: list[Breach]) -> Iterator[Breach]:
    """Yield the findings, except those about messages from before a group started, if it started at the end of the topic."""
    late = {group.name for group in config.groups if not group.is_from_start}
    begin: dict[tuple[str, str, int, str], int] = {}
    for row in rows:
        if row.kind is None and row.what.startswith(HANDLED_BY) and row.n:
            lane = row.source, row.topic, row.lane, row.what.removeprefix(HANDLED_BY)
            begin[lane] = min(row.first, begin.get(lane, row.first))
    for one in findings:
        first_seen = begin.get((one.source, one.topic, one.lane, one.group))
        if one.group not in late or one.kind is not FindingKind.LOST or (first_seen is not None and one.first >= first_seen):
            yield one

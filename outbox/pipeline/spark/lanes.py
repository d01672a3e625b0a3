"""
Which numbers of a lane are missing at a stage, or there more than once.

    rows of all frames -> cells, a bitmap of 32,768 numbers for each role -> sets of a bucket -> ranges of numbers -> findings

    role    numbers of the bucket       sent - broker = {3}: lost at the broker
    SENT    1 2 3 4 5                   broker - handled = {5}: lost at the inbox of the group
    broker  1 2   4 5                   assigned 1 to 6, and 6 has no role: lost at the outbox
    handled 1 2   4

Rows become bitmaps before the shuffle, so a stage of ten million rows sends a few hundred of them.
`messages` looks up which messages these are. docs/pipeline.md explains the rules.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.spark.columns import Bools, Ints, coded, distinct, integers, micros_of
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import NO_SUCH_LANE, NUMBERS_WITHOUT_LANE, Breach, FindingKind, Stage, merge
from outbox.pipeline.spark.history import History, Mark, Recorded
from outbox.pipeline.spark.roles import (
    BROKERS_OF,
    COLUMNS,
    NONE,
    PLACES_OF,
    SENT_OF,
    InGroup,
    Roles,
    Seen,
    micros,
    of_group,
    roles_of,
    unread,
)
from outbox.pipeline.spark.scan import ddl, scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


BUCKET = 32_768
HIGHEST = BUCKET << 34  # so that lane, role and bucket fit into one integer
CELLS_AT_ONCE = 256  # limits memory: each needs a byte per number for a moment

LANE = ("source", "topic", "lane")
LaneName = tuple[str | None, str | None, int | None]

CELL = pa.schema(
    {
        "source": pa.string(),
        "topic": pa.string(),
        "lane": pa.int16(),
        "role": pa.int32(),
        "bucket": pa.int64(),
        "bits": pa.binary(),
        "repeated": pa.binary(),
        "n": pa.int64(),
        "lowest": pa.int64(),
        "highest": pa.int64(),
        "future": pa.int64(),
    }
)

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


@dataclass(frozen=True)
class Cell:
    """
    The numbers of one lane in one role and bucket.

    Args:
        bits: which numbers are present; a bit or a byte for each.
        repeated: which of them are present more than once.
        n: the number of rows.
        future: the number of rows with a time in the future.
    """

    bits: Any
    repeated: Any
    n: int
    lowest: int
    highest: int
    future: int = 0

    def __or__(self, other: Cell) -> Cell:
        """Return the union of two cells."""
        return Cell(
            self.bits | other.bits,
            self.repeated | other.repeated | (self.bits & other.bits),
            self.n + other.n,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
            self.future + other.future,
        )


class Cells:
    """
    Accumulates the cells of a part of a frame.

    Args:
        no_number: the role of rows with an impossible number.
    """

    def __init__(self, no_number: int) -> None:
        self._no_number = no_number
        self._found: dict[tuple[LaneName, int, int], Cell] = {}

    def add(self, lanes: Ints, names: list[LaneName], roles: Ints, numbers: Ints, future: Bools) -> None:
        """
        Add rows.

        Args:
            lanes: index into `names`, for each row.
        """
        is_number = (numbers >= 1) & (numbers <= HIGHEST)
        all_are = bool(is_number.all())
        index = numbers - 1
        if not all_are:
            index, roles = np.where(is_number, index, 0), np.where(is_number, roles, self._no_number)
        keys, cells = _cells_of(lanes, roles, index >> 15)
        rows = np.bincount(cells, minlength=len(keys))
        futures = np.bincount(cells[future], minlength=len(keys))
        for first in range(0, len(keys), CELLS_AT_ONCE):
            inside = slice(None) if len(keys) <= CELLS_AT_ONCE else (cells >= first) & (cells < first + CELLS_AT_ONCE)
            many = min(CELLS_AT_ONCE, len(keys) - first)
            flags, repeated = _flags(cells[inside] - first, index[inside] & (BUCKET - 1), rows[first : first + many])
            for n in range(many):
                lane, role, bucket = keys[first + n]
                lowest, highest = _ends(flags[n], bucket)
                if not all_are:
                    own = numbers[cells == first + n]
                    lowest, highest = int(own.min()), int(own.max())
                cell = Cell(
                    _packed(flags[n]), _packed(repeated[n]), int(rows[first + n]), lowest, highest, int(futures[first + n])
                )
                where = names[lane], role, bucket
                self._found[where] = self._found[where] | cell if where in self._found else cell

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield a batch with a row for each cell."""
        rows = [
            {
                **dict(zip(LANE, name, strict=True)),
                "role": role,
                "bucket": bucket,
                "bits": cell.bits.tobytes(),
                "repeated": _of(cell.repeated),
                "n": cell.n,
                "lowest": cell.lowest,
                "highest": cell.highest,
                "future": cell.future,
            }
            for (name, role, bucket), cell in self._found.items()
        ]
        yield pa.RecordBatch.from_pylist(rows, CELL)


def lanes_of(batch: pa.RecordBatch) -> tuple[Ints, list[LaneName]]:
    """Return the lane of each row as an index into the returned list of lanes."""
    source, topic = coded(batch, "source"), coded(batch, "topic")
    lane, has_lane = integers(batch, "lane")
    numbered = lane + (1 << 15) if has_lane.all() else np.where(has_lane, lane + (1 << 15), 1 << 16)
    low = int(numbered.min(initial=1 << 16))
    span = int(numbered.max(initial=low)) - low + 1
    pair = source.codes.astype(np.int64) * len(topic.values) + topic.codes
    keys, lanes = distinct(pair * span + (numbered - low))
    names: list[LaneName] = []
    for code in keys.tolist():
        (of_source, of_topic), number = divmod(code // span, len(topic.values)), code % span + low
        names.append((source.values[of_source], topic.values[of_topic], None if number == 1 << 16 else number - (1 << 15)))
    return lanes, names


def _cells_of(lanes: Ints, roles: Ints, buckets: Ints) -> tuple[list[tuple[int, int, int]], Ints]:
    """Return the distinct cells, and the index of each row's cell among them."""
    if not len(lanes):
        return [], lanes
    low, many_roles = int(buckets.min()), int(roles.max()) + 1
    span = int(buckets.max()) - low + 1
    keys, cells = distinct((lanes * many_roles + roles) * span + (buckets - low))
    return [(*divmod(key // span, many_roles), key % span + low) for key in keys.tolist()], cells


def unpack(bits: bytes | Bytes) -> Bools:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)


def _packed(flags: Bools) -> Bytes:
    return np.packbits(flags, bitorder="little")


def _of(bits: Bytes) -> bytes | None:
    return bits.tobytes() if bits.any() else None


def _ends(flags: Bools, bucket: int) -> tuple[int, int]:
    before = bucket * BUCKET + 1
    return before + int(flags.argmax()), before + BUCKET - 1 - int(flags[::-1].argmax())


def _flags(cells: Ints, positions: Ints, rows: Ints) -> tuple[Bools, Bools]:
    """Return for each cell which positions are present, and which are repeated."""
    spots = cells * BUCKET + positions
    flags: Bools = np.zeros((len(rows), BUCKET), bool)
    flags.reshape(-1)[spots] = True
    repeated = np.zeros_like(flags)
    has_repeats = rows > np.count_nonzero(flags, axis=1)
    if has_repeats.any():
        dirty = has_repeats[cells]
        spot_numbers, n = np.unique(spots[dirty], return_counts=True)
        repeated.reshape(-1)[spot_numbers[n > 1]] = True
    return flags, repeated


MAX_RUNS = 1_000  # ranges of a kind in a bucket; if there are more, they are reported as one scattered range

HANDLED_BY = "handled by "
DEAD_LETTERS_OF = "dead letters of "
DISCARDED_BY = "discarded by operators for "
UNREAD_BY = "unread by "  # deferred, or not delivered yet

COUNTED = {"outbox": PLACES_OF, "sent": SENT_OF, "explained": {Seen.GONE}, "broker": BROKERS_OF}


@dataclass(frozen=True)
class ExpectedLane:
    """
    What is expected of a lane.

    Args:
        first, last: the numbers that it has assigned.
        is_seen: the history contains the messages that the broker has stored.
        groups: index -> name of the groups that must have an inbox row for each message.
    """

    first: int
    last: int
    is_seen: bool
    groups: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RangeResult:
    """A result about a range of numbers. With `kind` None it is a count named `what`, from the number `first` on."""

    kind: FindingKind | None
    stage: Stage
    what: str
    first: int
    last: int
    count: int


def roles_in(cells: Iterable[Mapping[str, Any]]) -> dict[int, Cell]:
    """Return the cells of a bucket by role, with a byte per number; merge cells of the same role."""
    found: dict[int, Cell] = {}
    for cell in cells:
        repeated = np.zeros(BUCKET, bool) if cell["repeated"] is None else unpack(cell["repeated"])
        role = Cell(unpack(cell["bits"]), repeated, cell["n"], cell["lowest"], cell["highest"], cell["future"])
        found[cell["role"]] = found[cell["role"]] | role if cell["role"] in found else role
    return found


def judge(lane: ExpectedLane, bucket: int, roles: Mapping[int, Cell]) -> Iterator[RangeResult]:
    """
    Compare the stages of a bucket.

    Args:
        roles: role, as in `transforms.roles` -> its cell.
    """
    if bucket == 0:
        yield from _no_numbers(roles)
    numbers = np.arange(bucket * BUCKET + 1, (bucket + 1) * BUCKET + 1)
    is_audited = numbers >= lane.first
    is_given_out = is_audited & (numbers <= lane.last)
    sets = {role: flags.bits & is_audited for role, flags in roles.items()}

    def of(wanted: Iterable[int]) -> Bools:
        flags: Bools = np.zeros(BUCKET, bool)
        for role in wanted:
            if role in sets:
                flags |= sets[role]
        return flags

    placed, stored = of(PLACES_OF), of(BROKERS_OF)
    handled = {group: of([of_group(group, InGroup.HANDLED)]) for group in lane.groups}
    arrived = np.logical_or.reduce([of([Seen.FOREIGN_GROUP]), *handled.values()])

    def runs(kind: FindingKind, stage: Stage, what: str, wrong: Bools) -> Iterator[RangeResult]:
        for first, last, count in runs_of(wrong):
            yield RangeResult(kind, stage, what, bucket * BUCKET + 1 + first, bucket * BUCKET + 1 + last, count)

    yield from runs(FindingKind.LOST, Stage.OUTBOX, "", is_given_out & ~placed & ~stored & ~arrived)
    yield from runs(FindingKind.ORPHAN, Stage.BROKER, "", stored & ~placed)
    yield from runs(FindingKind.ORPHAN, Stage.INBOX, "", of([Seen.FOREIGN_GROUP]) & ~stored & ~placed)
    yield from runs(FindingKind.BEYOND_LAST, Stage.OUTBOX, "", (placed | stored | arrived) & (numbers > lane.last))
    yield from runs(FindingKind.LATE, Stage.OUTBOX, "", of([Seen.OPEN_LATE]))
    if lane.is_seen:
        yield from runs(FindingKind.LOST, Stage.BROKER, "", of([Seen.SENT]) & ~stored)
        yield from runs(FindingKind.LATE, Stage.BROKER, "", of([Seen.UNREAD]) & ~stored)
    due = of([Seen.STORED]) | (of([Seen.UNSEEN]) & ~of([Seen.STORED_YOUNG])) if lane.is_seen else of([Seen.SENT])
    for group, name in lane.groups.items():
        discarded = of([of_group(group, InGroup.DISCARDED)])  # they have inbox rows, too
        dead = of([of_group(group, InGroup.DEAD_LETTER)]) & ~handled[group] & ~discarded
        explained = handled[group] | dead | discarded | of([of_group(group, InGroup.NOT_OWED)])
        waiting = of([of_group(group, InGroup.WAITING)]) & ~handled[group] & ~dead & ~discarded
        yield from runs(FindingKind.ORPHAN, Stage.INBOX, name, handled[group] & ~stored & ~placed)
        yield from runs(FindingKind.LOST, Stage.INBOX, name, due & ~explained & ~waiting)
        yield from runs(FindingKind.LATE, Stage.INBOX, name, due & ~explained & waiting)
        begin = roles[of_group(group, InGroup.HANDLED)].lowest if handled[group].any() else 0
        yield RangeResult(None, Stage.INBOX, f"{HANDLED_BY}{name}", begin, 0, int((handled[group] & ~discarded).sum()))
        for what, flags in ((DEAD_LETTERS_OF, dead), (DISCARDED_BY, discarded), (UNREAD_BY, waiting)):
            yield _count(Stage.INBOX, f"{what}{name}", flags)
    for stage, what, repeated in _repeats(lane, roles):
        yield from runs(FindingKind.DUPLICATED, stage, what, repeated & is_audited)
    yield from _from_the_future(lane, roles)
    for what, wanted in COUNTED.items():
        yield _count(Stage.BROKER if what == "broker" else Stage.OUTBOX, what, of(wanted))
    yield _count(Stage.OUTBOX, "in flight", of({Seen.OPEN, Seen.SENT_YOUNG, Seen.UNREAD, Seen.STORED_YOUNG}) & ~arrived)


def _no_numbers(roles: Mapping[int, Cell]) -> Iterator[RangeResult]:
    for role, stage in (
        (Seen.NO_NUMBER_PLACE, Stage.OUTBOX),
        (Seen.NO_NUMBER_BROKER, Stage.BROKER),
        (Seen.NO_NUMBER_INBOX, Stage.INBOX),
    ):
        if role in roles:
            yield RangeResult(FindingKind.NO_NUMBER, stage, "", roles[role].lowest, roles[role].highest, roles[role].n)


def _repeats(lane: ExpectedLane, roles: Mapping[int, Cell]) -> Iterator[tuple[Stage, str, Bools]]:
    """Yield the repeated numbers of each stage. Whether they are one message or several is looked up later."""
    for stage, what, wanted in (
        (Stage.OUTBOX, "", PLACES_OF),
        (Stage.BROKER, "", BROKERS_OF),
        *((Stage.INBOX, name, [of_group(group, InGroup.HANDLED)]) for group, name in lane.groups.items()),
    ):
        present = [roles[role] for role in wanted if role in roles]
        if present:
            yield stage, what, reduce(operator.or_, present).repeated


def _from_the_future(lane: ExpectedLane, roles: Mapping[int, Cell]) -> Iterator[RangeResult]:
    stages: dict[int, Stage] = {**dict.fromkeys(PLACES_OF, Stage.OUTBOX), **dict.fromkeys(BROKERS_OF, Stage.BROKER)}
    names = {of_group(group, InGroup.HANDLED): name for group, name in lane.groups.items()}
    for role, found in roles.items():
        stage = stages.get(role) if role not in names else Stage.INBOX
        if stage is not None and found.future:
            yield RangeResult(FindingKind.CLOCK, stage, names.get(role, ""), found.lowest, found.highest, 1)


def _count(stage: Stage, what: str, found: Bools) -> RangeResult:
    return RangeResult(None, stage, what, 0, 0, int(found.sum()))


def runs_of(wrong: Bools) -> list[tuple[int, int, int]]:
    """Return ranges of consecutive positions as (first, last, count)."""
    places = np.flatnonzero(wrong)
    if len(places) == 0:
        return []
    starts = np.flatnonzero(np.diff(places, prepend=places[0] - 2) > 1)
    if len(starts) > MAX_RUNS:
        return [(int(places[0]), int(places[-1]), len(places))]
    ends: Ints = np.append(starts[1:], len(places)) - 1
    return [(int(places[a]), int(places[b]), int(b - a + 1)) for a, b in zip(starts, ends, strict=True)]


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
    lanes: dict[LaneName, ExpectedLane] = {(mark.source, mark.topic, mark.lane): _lane(config, mark) for mark in marks}
    bucket = [*LANE, "bucket"]
    cell = F.struct(*(name for name in CELL.names if name not in bucket))
    by_bucket = cells(spark, config, history).groupBy(*bucket).agg(F.collect_list(cell).alias("cells"))
    return by_bucket.mapInArrow(_judge_batches(lanes), ddl(RESULT)).collect()


def cells(spark: SparkSession, config: PipelineConfig, history: History) -> DataFrame:
    """Return the cells of all stages, as defined in `CELL`."""
    latest = micros(history.as_of + timedelta(seconds=config.clock_tolerance_seconds))
    columns = {name: tuple(dict.fromkeys((*LANE, "number", *wanted))) for name, wanted in COLUMNS.items()}
    return scan(spark, history, columns, _summarize(roles_of(config, history), latest), CELL)


def _summarize(roles: Roles, latest: int) -> Any:
    def summarize(frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = Cells(NO_NUMBER[frame])
        for batch in batches:
            number, has_number = integers(batch, "number")
            lane, names = lanes_of(batch)
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


def _judge_batches(lanes: Mapping[LaneName, ExpectedLane]) -> Any:
    def judge_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [row for bucket in batch.to_pylist() for row in _judge_bucket(lanes, **bucket)]
            columns: list[Any] = list(zip(*rows, strict=True)) or [[]] * len(RESULT)
            arrays = [pa.array(values, type=column.type) for values, column in zip(columns, RESULT, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=RESULT)

    return judge_batches


def _judge_bucket(
    lanes: Mapping[LaneName, ExpectedLane], source: str, topic: str, lane: int, bucket: int, cells: list[dict[str, Any]]
) -> Iterator[tuple[Any, ...]]:
    name = source, topic, lane
    if name not in lanes:
        for cell in cells:
            yield *name, IS_UNKNOWN, "", str(cell["role"]), cell["lowest"], cell["highest"], cell["n"]
        return
    yield *name, IS_SEEN, "", "", bucket, bucket, sum(cell["n"] for cell in cells)
    for finding in judge(lanes[name], bucket, roles_in(cells)):
        yield *name, finding.kind, finding.stage, finding.what, finding.first, finding.last, finding.count


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
    for bucket in [*sorted(present), (end + BUCKET - 2) // BUCKET]:
        gap_end = min(bucket * BUCKET + 1, end)
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
        first = max(first, (bucket + 1) * BUCKET + 1)


def _of_groups_that_began_late(config: PipelineConfig, rows: list[Any], findings: list[Breach]) -> Iterator[Breach]:
    """Yield the findings, except those about messages from before a group started, if it started at the end of the topic."""
    late = {group.name for group in config.groups if not group.is_from_start}
    begin: dict[tuple[str, str, int, str], int] = {}
    for row in rows:
        if row.kind is None and row.what.startswith(HANDLED_BY) and row.n:
            lane = row.source, row.topic, row.lane, row.what.removeprefix(HANDLED_BY)
            begin[lane] = min(row.first, begin.get(lane, row.first))
    for finding in findings:
        first_seen = begin.get((finding.source, finding.topic, finding.lane, finding.group))
        if (
            finding.group not in late
            or finding.kind is not FindingKind.LOST
            or (first_seen is not None and finding.first >= first_seen)
        ):
            yield finding

"""
Compare outbox, broker and inbox number by number: find the numbers of a lane that are missing at a stage, or there more than
once, and look up which messages these are.

A lane numbers messages of a topic when they are claimed. Its mark has the first and the last of these numbers. The role of a row,
such as SENT, says what the row proves about its message. A cell is a bitmap of the numbers that have one role in one bucket. A
bucket is a range of 32,768 numbers (`cells.py`).

    rows of all frames (history.py) -> cells -> comparison of the cells of a bucket -> ranges of numbers -> message ids

    role    numbers in the bucket
    SENT    1 2 3 4 5                   SENT without broker = {3}: lost at the broker
    broker  1 2   4 5                   broker without handled = {5}: lost at the inbox of the group
    handled 1 2   4                     the lane has assigned 1 to 6, and 6 has no role: lost at the outbox

    number 3, lost at the broker      -- its row in the frame places  -->  its message id
    number 7, repeated at the broker  -- its rows in the frame broker -->  one message twice, or two messages: RENUMBERED

docs/pipeline.md explains the rules.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.spark.cells import (
    BROKER_ROLES,
    BUCKET,
    CELL,
    COLUMNS,
    HIGHEST,
    LANE,
    LANE_FIELDS,
    NO_ROLE,
    OUTBOX_ROLES,
    SENT_ROLES,
    Cell,
    Cells,
    GroupRole,
    LaneName,
    Role,
    RoleRules,
    group_role,
    lanes_of,
    micros,
    role_rules,
    runs_of,
    unpack,
    unread_detail,
)
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import NO_SUCH_LANE, NUMBERS_WITHOUT_LANE, Breach, FindingKind, Report, Stage, merge
from outbox.pipeline.spark.history import History, Mark, RecordedTimes
from outbox.pipeline.spark.scan import Bools, Ints, collected, ddl, integers, micros_of, scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


HANDLED_BY = "handled by "
DEAD_LETTERS_OF = "dead letters of "
DISCARDED_BY = "discarded by operators for "
UNREAD_BY = "unread by "  # deferred, or not delivered yet

# name of a count -> the roles that it counts
COUNTED_ROLES = {"outbox": OUTBOX_ROLES, "sent": SENT_ROLES, "explained": {Role.GONE}, "broker": BROKER_ROLES}


@dataclass(frozen=True)
class ExpectedLane:
    """
    What is expected of a lane: the numbers of its messages, and the groups that must have handled them.

    Args:
        first, last: the range of numbers that the lane has assigned.
        is_broker_known: the history contains the messages that the broker has stored, so they can be compared with the outbox.
        groups: index -> name of the groups that must have an inbox row for each message.
    """

    first: int
    last: int
    is_broker_known: bool
    groups: Mapping[int, str] = field(default_factory=dict)


class RangeResult(NamedTuple):
    """
    A finding about `n` numbers from `first` to `last`, with the consumer group as its `label`. Or, if `kind` is None, a count of
    `n` messages, with its name as its `label`; for the count of handled messages, `first` is the lowest handled number.
    """

    kind: FindingKind | None
    stage: Stage
    label: str
    first: int
    last: int
    n: int


def roles_in(cells: Iterable[Mapping[str, Any]]) -> dict[int, Cell]:
    """Return role -> cell for one bucket, unpacked to a byte per number. Cells of the same role are merged."""
    by_role: dict[int, Cell] = {}
    for cell in cells:
        repeated = np.zeros(BUCKET, bool) if cell["repeated"] is None else unpack(cell["repeated"])
        role = Cell(unpack(cell["bits"]), repeated, cell["n"], cell["lowest"], cell["highest"], cell["future"])
        by_role[cell["role"]] = by_role[cell["role"]] | role if cell["role"] in by_role else role
    return by_role


def compare_stages(lane: ExpectedLane, bucket: int, roles: Mapping[int, Cell]) -> Iterator[RangeResult]:
    """
    Yield the findings and counts of one bucket of a lane.

    Args:
        roles: role, as in `cells.py` -> its cell.
    """
    if bucket == 0:
        yield from _no_numbers(roles)
    numbers = np.arange(bucket * BUCKET + 1, (bucket + 1) * BUCKET + 1)
    is_audited = numbers >= lane.first
    is_assigned = is_audited & (numbers <= lane.last)
    sets = {role: flags.bits & is_audited for role, flags in roles.items()}

    def with_role(*wanted: int) -> Bools:
        flags: Bools = np.zeros(BUCKET, bool)
        for role in wanted:
            if role in sets:
                flags |= sets[role]
        return flags

    placed, stored = with_role(*OUTBOX_ROLES), with_role(*BROKER_ROLES)
    handled = {group: with_role(group_role(group, GroupRole.HANDLED)) for group in lane.groups}
    arrived = np.logical_or.reduce([with_role(Role.FOREIGN_GROUP), *handled.values()])

    def ranges(kind: FindingKind, stage: Stage, label: str, wrong: Bools) -> Iterator[RangeResult]:
        for first, last, count in runs_of(wrong):
            yield RangeResult(kind, stage, label, bucket * BUCKET + 1 + first, bucket * BUCKET + 1 + last, count)

    yield from ranges(FindingKind.LOST, Stage.OUTBOX, "", is_assigned & ~placed & ~stored & ~arrived)
    yield from ranges(FindingKind.ORPHAN, Stage.BROKER, "", stored & ~placed)
    yield from ranges(FindingKind.ORPHAN, Stage.INBOX, "", with_role(Role.FOREIGN_GROUP) & ~stored & ~placed)
    yield from ranges(FindingKind.BEYOND_LAST, Stage.OUTBOX, "", (placed | stored | arrived) & (numbers > lane.last))
    yield from ranges(FindingKind.LATE, Stage.OUTBOX, "", with_role(Role.OPEN_LATE))
    # `due` has the messages that the groups must have handled by now.
    if lane.is_broker_known:
        yield from ranges(FindingKind.LOST, Stage.BROKER, "", with_role(Role.SENT) & ~stored)
        yield from ranges(FindingKind.LATE, Stage.BROKER, "", with_role(Role.UNREAD) & ~stored)
        due = with_role(Role.STORED) | (with_role(Role.UNSEEN) & ~with_role(Role.STORED_YOUNG))
    else:
        due = with_role(Role.SENT)
    for group, name in lane.groups.items():
        discarded = with_role(group_role(group, GroupRole.DISCARDED))  # discarded messages have inbox rows, too
        dead = with_role(group_role(group, GroupRole.DEAD_LETTER)) & ~handled[group] & ~discarded
        explained = handled[group] | dead | discarded | with_role(group_role(group, GroupRole.NOT_OWED))
        waiting = with_role(group_role(group, GroupRole.WAITING)) & ~handled[group] & ~dead & ~discarded
        yield from ranges(FindingKind.ORPHAN, Stage.INBOX, name, handled[group] & ~stored & ~placed)
        yield from ranges(FindingKind.LOST, Stage.INBOX, name, due & ~explained & ~waiting)
        yield from ranges(FindingKind.LATE, Stage.INBOX, name, due & ~explained & waiting)
        lowest = roles[group_role(group, GroupRole.HANDLED)].lowest if handled[group].any() else 0
        yield RangeResult(None, Stage.INBOX, f"{HANDLED_BY}{name}", lowest, 0, int((handled[group] & ~discarded).sum()))
        for prefix, flags in ((DEAD_LETTERS_OF, dead), (DISCARDED_BY, discarded), (UNREAD_BY, waiting)):
            yield _count(Stage.INBOX, f"{prefix}{name}", flags)
    for stage, label, repeated in _repeats(lane, roles):
        yield from ranges(FindingKind.DUPLICATED, stage, label, repeated & is_audited)
    yield from _from_the_future(lane, roles)
    for label, wanted in COUNTED_ROLES.items():
        yield _count(Stage.BROKER if label == "broker" else Stage.OUTBOX, label, with_role(*wanted))
    in_flight = with_role(Role.OPEN, Role.SENT_YOUNG, Role.UNREAD, Role.STORED_YOUNG) & ~arrived
    yield _count(Stage.OUTBOX, "in flight", in_flight)


def _no_numbers(roles: Mapping[int, Cell]) -> Iterator[RangeResult]:
    """Yield a finding for each stage that has rows with numbers that no lane can assign."""
    for role, stage in (
        (Role.NO_NUMBER_PLACE, Stage.OUTBOX),
        (Role.NO_NUMBER_BROKER, Stage.BROKER),
        (Role.NO_NUMBER_INBOX, Stage.INBOX),
    ):
        if role in roles:
            yield RangeResult(FindingKind.NO_NUMBER, stage, "", roles[role].lowest, roles[role].highest, roles[role].n)


def _repeats(lane: ExpectedLane, roles: Mapping[int, Cell]) -> Iterator[tuple[Stage, str, Bools]]:
    """Yield the repeated numbers of each stage. `with_messages` looks up whether they belong to one message or to several."""
    for stage, label, wanted in (
        (Stage.OUTBOX, "", OUTBOX_ROLES),
        (Stage.BROKER, "", BROKER_ROLES),
        *((Stage.INBOX, name, [group_role(group, GroupRole.HANDLED)]) for group, name in lane.groups.items()),
    ):
        present = [roles[role] for role in wanted if role in roles]
        if present:
            yield stage, label, reduce(operator.or_, present).repeated


def _from_the_future(lane: ExpectedLane, roles: Mapping[int, Cell]) -> Iterator[RangeResult]:
    """Yield a finding for each role that has rows with a time in the future."""
    stages: dict[int, Stage] = {**dict.fromkeys(OUTBOX_ROLES, Stage.OUTBOX), **dict.fromkeys(BROKER_ROLES, Stage.BROKER)}
    names = {group_role(group, GroupRole.HANDLED): name for group, name in lane.groups.items()}
    for role, cell in roles.items():
        stage = stages.get(role) if role not in names else Stage.INBOX
        if stage is not None and cell.future:
            yield RangeResult(FindingKind.CLOCK, stage, names.get(role, ""), cell.lowest, cell.highest, 1)


def _count(stage: Stage, label: str, counted: Bools) -> RangeResult:
    return RangeResult(None, stage, label, 0, 0, int(counted.sum()))


RESULT = pa.schema(
    [
        *LANE_FIELDS,
        *((name, pa.string()) for name in ("kind", "stage", "label")),
        *((name, pa.int64()) for name in ("first", "last", "n")),
    ]
)
HAS_ROWS = "bucket"  # the kind of a result that says only that the bucket has rows
UNKNOWN_LANE_ROLE = "unknown"  # the kind of a result about one role in a lane without a mark; `label` is the role

ROLE_WITHOUT_NUMBER = {
    "places": Role.NO_NUMBER_PLACE,
    "broker": Role.NO_NUMBER_BROKER,
    "inbox": Role.NO_NUMBER_INBOX,
    "failed_deliveries": Role.NO_NUMBER_INBOX,
}


def audit_lanes(spark: SparkSession, config: PipelineConfig, history: History) -> Report:
    """
    Compare all stages of all lanes.

    The findings have no message ids yet, and DUPLICATED stands for any repeated number, of one message or of several.
    `with_messages` completes both.
    """
    marks = history.read_marks()
    result = Report()
    rows = _compare_lanes(spark, config, history, marks)
    if unknown := _unknown_lanes(history, rows, result):
        marks = [*marks, *unknown]
        rows = _compare_lanes(spark, config, history, marks)
    _collect(result, config, history, marks, rows)
    return result


def _compare_lanes(spark: SparkSession, config: PipelineConfig, history: History, marks: Sequence[Mark]) -> list[Any]:
    lanes: dict[LaneName, ExpectedLane] = {(mark.source, mark.topic, mark.lane): _expected(config, mark) for mark in marks}
    bucket = [*LANE, "bucket"]
    cell = F.struct(*(name for name in CELL.names if name not in bucket))
    by_bucket = cells(spark, config, history).groupBy(*bucket).agg(F.collect_list(cell).alias("cells"))
    return collected(by_bucket.mapInArrow(_compare_buckets(lanes), ddl(RESULT)))


def cells(spark: SparkSession, config: PipelineConfig, history: History) -> DataFrame:
    """Return the cells of all stages, as defined in `CELL`."""
    latest = micros(history.as_of + timedelta(seconds=config.clock_tolerance_seconds))
    columns = {name: tuple(dict.fromkeys((*LANE, "number", *wanted))) for name, wanted in COLUMNS.items()}
    return scan(spark, history, columns, _summarize(role_rules(config, history), latest), CELL)


def _summarize(roles: RoleRules, latest: int) -> Any:
    """Return a function for `scan` that collects rows of a frame into cells."""

    def summarize(frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        cells_of_part = Cells(ROLE_WITHOUT_NUMBER[frame])
        for batch in batches:
            number, has_number = integers(batch, "number")
            lane, names = lanes_of(batch)
            future = micros_of(batch, "at") > latest
            for role in roles.of(frame, batch):
                is_counted = has_number & (role != NO_ROLE)
                rows = slice(None) if is_counted.all() else is_counted
                cells_of_part.add(lane[rows], names, role[rows], number[rows], future[rows])
        yield from cells_of_part.batches()

    return summarize


def _expected(config: PipelineConfig, mark: Mark) -> ExpectedLane:
    groups = {index: group.name for index, group in enumerate(config.groups) if mark.topic in group.topics}
    return ExpectedLane(mark.first, mark.last, mark.topic in config.seen_topics, groups)


def _compare_buckets(lanes: Mapping[LaneName, ExpectedLane]) -> Any:
    """Return a function for `mapInArrow` that compares the stages of each bucket."""

    def compare_buckets(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [row for bucket in batch.to_pylist() for row in _compare_bucket(lanes, **bucket)]
            columns: list[Any] = list(zip(*rows, strict=True)) or [[]] * len(RESULT)
            arrays = [pa.array(values, type=column.type) for values, column in zip(columns, RESULT, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=RESULT)

    return compare_buckets


def _compare_bucket(
    lanes: Mapping[LaneName, ExpectedLane], source: str, topic: str, lane: int, bucket: int, cells: list[dict[str, Any]]
) -> Iterator[tuple[Any, ...]]:
    name = source, topic, lane
    if name not in lanes:
        for cell in cells:
            yield *name, UNKNOWN_LANE_ROLE, "", str(cell["role"]), cell["lowest"], cell["highest"], cell["n"]
        return
    yield *name, HAS_ROWS, "", "", bucket, bucket, sum(cell["n"] for cell in cells)
    for result in compare_stages(lanes[name], bucket, roles_in(cells)):
        yield *name, *result


def _unknown_lanes(history: History, rows: list[Any], result: Report) -> list[Mark]:
    """
    Return marks for the lanes of this database that have none, up to their highest number, so that they can be compared, too.

    Adds a finding for each of these lanes to `result.findings`, and the number of other databases' rows to `result.foreign`.
    """
    by_lane: dict[tuple[str, str, int | None], list[Any]] = defaultdict(list)
    for row in rows:
        if row.kind == UNKNOWN_LANE_ROLE:
            by_lane[row.source, row.topic, row.lane].append(row)
    marks = []
    for (source, topic, lane), rows_of_lane in by_lane.items():
        by_role: Counter[str] = Counter()
        for row in rows_of_lane:
            by_role[row.label] += row.n
        if source not in history.sources:
            result.foreign += by_role.total()
            continue
        if lane is None:
            count = max(by_role.values())
            breach = Breach(FindingKind.UNKNOWN_LANE, Stage.OUTBOX, topic, source, count=count, detail=NUMBERS_WITHOUT_LANE)
            result.findings.append(breach)
            continue
        first, last = min(row.first for row in rows_of_lane), max(row.last for row in rows_of_lane)
        span = {"first": first, "last": last, "count": max(by_role.values()), "detail": NO_SUCH_LANE}
        result.findings.append(Breach(FindingKind.UNKNOWN_LANE, Stage.OUTBOX, topic, source, lane, **span))
        marks.append(Mark(source, topic, lane, 1, last))
    return marks


def _collect(result: Report, config: PipelineConfig, history: History, marks: Sequence[Mark], rows: list[Any]) -> None:
    """Add the counts and findings of all lanes with a mark to `result`."""
    by_lane = {(mark.source, mark.topic, mark.lane): mark for mark in marks}
    counts: dict[str, Counter[str]] = {mark.topic: Counter() for mark in marks}
    buckets: dict[Mark, set[int]] = {mark: set() for mark in marks}
    findings = []
    for row in rows:
        if row.kind == UNKNOWN_LANE_ROLE:
            continue
        mark = by_lane[row.source, row.topic, row.lane]
        if row.kind == HAS_ROWS:
            buckets[mark].add(row.first)
        elif row.kind is None:
            counts[mark.topic][row.label] += row.n
        else:
            findings.append(_finding(mark, row, history.recorded.get(mark.topic)))
    for mark in marks:
        counts[mark.topic]["assigned"] += max(0, mark.last - mark.first + 1)
        findings += _absent_buckets(mark, buckets[mark])
    result.counts = {topic: dict(of_topic) for topic, of_topic in counts.items()}
    result.findings += _without_losses_before_groups_began(config, rows, merge(findings))


def _finding(mark: Mark, row: Any, recorded: RecordedTimes | None) -> Breach:
    group = row.label if row.stage == Stage.INBOX else ""
    range_size = row.last - row.first + 1
    detail = (
        f"{row.n} of these {range_size} numbers"
        if row.kind not in (FindingKind.DUPLICATED, FindingKind.CLOCK) and row.n < range_size
        else ""
    )
    if row.kind == FindingKind.LATE and row.stage == Stage.BROKER:
        detail = unread_detail(recorded)
    return Breach(
        FindingKind(row.kind), Stage(row.stage), mark.topic, mark.source, mark.lane, group, "", row.first, row.last, row.n, detail
    )


def _absent_buckets(mark: Mark, present: set[int]) -> Iterator[Breach]:
    """
    Yield findings for the assigned numbers of buckets without any row.

    Args:
        present: the buckets with rows. The loop runs over them, since far more buckets may be missing.
    """
    first, end = mark.first, mark.last + 1
    for bucket in [*sorted(present), (end + BUCKET - 2) // BUCKET]:
        gap_end = min(bucket * BUCKET + 1, end)
        if gap_end > first:
            location = FindingKind.LOST, Stage.OUTBOX, mark.topic, mark.source, mark.lane
            yield Breach(*location, first=first, last=gap_end - 1, count=gap_end - first)
        first = max(first, (bucket + 1) * BUCKET + 1)


def _without_losses_before_groups_began(config: PipelineConfig, rows: list[Any], findings: list[Breach]) -> Iterator[Breach]:
    """
    Yield the findings, except losses of groups that started at the end of a topic, before the first number that they handled.
    """
    started_at_end = {group.name for group in config.groups if not group.is_from_start}
    first_handled: dict[tuple[str, str, int, str], int] = {}
    for row in rows:
        if row.kind is None and row.label.startswith(HANDLED_BY) and row.n:
            lane = row.source, row.topic, row.lane, row.label.removeprefix(HANDLED_BY)
            first_handled[lane] = min(row.first, first_handled.get(lane, row.first))
    for finding in findings:
        first = first_handled.get((finding.source, finding.topic, finding.lane, finding.group))
        if (
            finding.group not in started_at_end
            or finding.kind is not FindingKind.LOST
            or (first is not None and finding.first >= first)
        ):
            yield finding


LANE_SHIFT = 49  # a number needs at most 49 bits; the index of its lane is in the bits above them
BEFORE_ALL = np.iinfo(np.int64).min  # the end of an empty range before the first one


def index_of(ranges: Mapping[LaneName, Iterable[tuple[int, int]]]) -> RangeIndex:
    """Return an index of ranges (first and last number), in which millions of numbers can be looked up."""
    codes = {lane: code for code, lane in enumerate(ranges)}
    spans = [(code, first, last) for lane, code in codes.items() for first, last in _merged(ranges[lane])]
    starts = np.array([(code << LANE_SHIFT) + first - 1 for code, first, _ in spans], np.int64)
    ends = np.array([(code << LANE_SHIFT) + last - 1 for code, _, last in spans], np.int64)
    return RangeIndex(codes, starts, ends)


@dataclass(frozen=True)
class RangeIndex:
    """Sorted ranges, with lane and number packed into one integer."""

    codes: Mapping[LaneName, int]
    starts: Ints
    ends: Ints

    def has(self, lanes: Ints, names: list[LaneName], numbers: Ints) -> Bools:
        """
        Return for each row whether its number is in a range.

        Args:
            lanes: the index of the row's lane in `names`.
        """
        is_in_range: Bools = np.zeros(len(numbers), bool)
        codes = np.array([self.codes.get(name, -1) for name in names], np.int64)
        if not len(self.starts) or not len(numbers) or (codes < 0).all():
            return is_in_range
        packed = (codes << LANE_SHIFT)[lanes] + numbers - 1
        range_number = np.searchsorted(self.starts, packed, "right") - 1
        hits = np.flatnonzero(packed <= np.append(self.ends, BEFORE_ALL)[range_number])
        is_in_range[hits[(numbers[hits] >= 1) & (numbers[hits] <= HIGHEST)]] = True
        return is_in_range


def _merged(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges in order; overlapping ones are merged."""
    first, last = 0, -1
    for start, end in sorted(spans):
        if start > last:
            if last >= first:
                yield first, last
            first = start
        last = max(last, end)
    if last >= first:
        yield first, last


def repeats(rows: pa.Table, *, ids: int) -> Iterator[dict[str, Any]]:
    """
    Yield ranges of repeated numbers: DUPLICATED (one message several times) or RENUMBERED (several messages with one number).

    Args:
        rows: consumer_group, number and message_id of one lane and bucket.
        ids: the maximum number of message ids in one result.

    Yields:
        consumer_group, kind, first, last, numbers (how many numbers from first to last are repeated), n (superfluous rows, or
        messages that share a number), ids (of the messages with the first of these numbers).
    """
    keys = rows.group_by(["consumer_group", "number"]).aggregate([("message_id", "count"), ("message_id", "distinct")])
    keys = keys.filter(pc.greater(keys["message_id_count"], 1)).sort_by(
        [("consumer_group", "ascending"), ("number", "ascending")]
    )
    for group in keys["consumer_group"].unique().to_pylist():
        rows_of_group = keys.filter(pc.equal(keys["consumer_group"], group)).to_pylist()
        for kind in FindingKind.DUPLICATED, FindingKind.RENUMBERED:
            matching = [
                row for row in rows_of_group if (len(row["message_id_distinct"]) == 1) == (kind is FindingKind.DUPLICATED)
            ]
            for first, last, rows_in_range in _spans(matching):
                yield {
                    "consumer_group": group,
                    "kind": kind.value,
                    "first": first,
                    "last": last,
                    "numbers": len(rows_in_range),
                    "n": sum(
                        row["message_id_count"] - 1 if kind is FindingKind.DUPLICATED else len(row["message_id_distinct"])
                        for row in rows_in_range
                    ),
                    "ids": [message_id for row in rows_in_range[:ids] for message_id in sorted(row["message_id_distinct"])[:ids]],
                }


def _spans(rows: list[dict[str, Any]]) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """Yield ranges of consecutive numbers, with their rows; a single range if there are more than `MAX_RUNS`."""
    if not rows:
        return
    lowest = (rows[0]["number"] - 1) // BUCKET * BUCKET + 1
    is_repeated: Bools = np.zeros(BUCKET, bool)
    is_repeated[[row["number"] - lowest for row in rows]] = True
    start = 0
    for first, last, count in runs_of(is_repeated):
        yield lowest + first, lowest + last, rows[start : start + count]
        start += count


NumberKey = tuple[str, str, int, int]
Ranges = dict[str, dict[LaneName, list[tuple[int, int]]]]  # frame -> lane -> first and last numbers

FRAME_OF = {Stage.OUTBOX: "places", Stage.BROKER: "broker", Stage.INBOX: "inbox"}
KINDS_WITHOUT_IDS = (FindingKind.UNKNOWN_LANE, FindingKind.NO_NUMBER, FindingKind.CLOCK)

# A task holds all rows of a group in memory, so groups must not be large; but each group costs Spark more than a few rows do.
BUCKETS_PER_GROUP = 8

FOR_ID, FOR_REPEATS = 1, 2  # why a row is looked up: for its message id, or because its number is repeated. The sum means both

# part: the number of the group of buckets that one task looks up.
WANTED_ROW = pa.schema(
    [
        ("frame", pa.string()),
        *LANE_FIELDS,
        *((name, pa.int64()) for name in ("number", "part")),
        *((name, pa.string()) for name in ("consumer_group", "message_id")),
        ("why", pa.int8()),
    ]
)

# A range of repeated numbers, as in `repeats`; or, if `kind` is "", the number `first` and the id of its message.
LOOKED_UP = pa.schema(
    [
        ("frame", pa.string()),
        *LANE_FIELDS,
        *((name, pa.string()) for name in ("consumer_group", "kind")),
        *((name, pa.int64()) for name in ("first", "last", "numbers", "n")),
        ("ids", pa.list_(pa.string())),
    ]
)


def with_messages(spark: SparkSession, config: PipelineConfig, history: History, findings: list[Breach]) -> list[Breach]:
    """
    Return the findings with at most `ids_per_finding` message ids each, from one pass over the frames concerned.

    A finding about repeated numbers becomes DUPLICATED (one message several times) or RENUMBERED (several messages).
    """
    for_ids, for_repeats = _numbers_to_look_up(config, findings)
    columns: dict[str, tuple[str, ...]] = {
        frame: (*LANE, "number", "message_id") for frame in FRAME_OF.values() if frame in for_ids or frame in for_repeats
    }
    if not columns:
        return findings
    if "inbox" in columns:
        columns["inbox"] = (*columns["inbox"], "consumer_group")
    indexes = ({frame: index_of(ranges) for frame, ranges in wanted.items()} for wanted in (for_ids, for_repeats))
    rows = scan(spark, history, columns, _row_filter(*indexes), WANTED_ROW)
    looked_up = rows.groupBy("frame", *LANE, "part").applyInArrow(_look_up(config.ids_per_finding), ddl(LOOKED_UP)).toArrow()
    repeated_at = {_location(finding) for finding in findings if _is_repeated(finding)}
    completed = [finding for finding in findings if not _is_repeated(finding)]
    is_id = pc.equal(looked_up["kind"], "")
    repeat_findings = map(_repeat_finding, looked_up.filter(pc.invert(is_id)).to_pylist())
    completed += [repeat for repeat in repeat_findings if _location(repeat) in repeated_at]
    id_rows = looked_up.filter(is_id)
    numbers = zip(*(id_rows[name].to_pylist() for name in (*LANE, "first")), strict=True)
    ids = dict(zip(numbers, pc.list_flatten(id_rows["ids"]).to_pylist(), strict=True))  # each row has one id
    return [_with_ids(config, finding, ids) for finding in merge(completed)]


def _is_repeated(finding: Breach) -> bool:
    return finding.kind is FindingKind.DUPLICATED and finding.lane >= 0


def _location(finding: Breach) -> tuple[Any, ...]:
    return finding.stage, finding.source, finding.topic, finding.lane, finding.group


def _numbers_to_look_up(config: PipelineConfig, findings: Iterable[Breach]) -> tuple[Ranges, Ranges]:
    """Return the numbers to look up, by frame and lane: first for message ids, second because they are repeated."""
    for_ids: Ranges = defaultdict(lambda: defaultdict(list))
    for_repeats: Ranges = defaultdict(lambda: defaultdict(list))
    for finding in findings:
        lane = (finding.source, finding.topic, finding.lane)
        if _is_repeated(finding):
            for_repeats[FRAME_OF[finding.stage]][lane].append((finding.first, finding.last))
        elif not (
            finding.lane < 0
            or finding.kind in KINDS_WITHOUT_IDS
            or (finding.kind is FindingKind.LOST and finding.stage is Stage.OUTBOX)
        ):
            last = min(finding.last, finding.first + config.ids_per_finding - 1)
            for frame in _frames_with_ids(finding):
                for_ids[frame][lane].append((finding.first, last))
    return for_ids, for_repeats


def _frames_with_ids(finding: Breach) -> tuple[str, ...]:
    """Return the frames that may have the message ids of a finding."""
    if finding.kind is FindingKind.ORPHAN:
        return (FRAME_OF[finding.stage],)
    return ("places", "broker") if finding.kind is FindingKind.BEYOND_LAST or finding.stage is Stage.INBOX else ("places",)


def _row_filter(for_ids: Mapping[str, RangeIndex], for_repeats: Mapping[str, RangeIndex]) -> Any:
    """Return a function for `scan` that yields the rows whose numbers are to be looked up, as rows of WANTED_ROW."""

    def select(frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            number, _ = integers(batch, "number")
            lanes, names = lanes_of(batch)
            why: Any = np.zeros(len(number), np.int8)
            for index, reason in (for_ids.get(frame), FOR_ID), (for_repeats.get(frame), FOR_REPEATS):
                if index is not None:
                    why += np.where(index.has(lanes, names, number), reason, 0).astype(np.int8)
            if why.any():
                yield _wanted_rows(frame, batch, why)

    return select


def _wanted_rows(frame: str, batch: pa.RecordBatch, why: Any) -> pa.RecordBatch:
    rows = batch.filter(pa.array(why > 0))
    number, _ = integers(rows, "number")
    group = rows.column("consumer_group").cast(pa.string()) if frame == "inbox" else pa.array([""] * len(number))
    lane = [rows.column("source").cast(pa.string()), rows.column("topic").cast(pa.string()), rows.column("lane")]
    part = pa.array((number - 1) // (BUCKET * BUCKETS_PER_GROUP))
    columns = [pa.array([frame] * len(number)), *lane, pa.array(number), part, group, rows.column("message_id")]
    return pa.RecordBatch.from_arrays([*columns, pa.array(why[why > 0])], schema=WANTED_ROW)


def _look_up(max_ids: int) -> Any:
    """Return a function that returns the messages of the wanted numbers in a group of buckets, and their repeated numbers."""

    def look_up(table: pa.Table) -> pa.Table:  # Spark needs the annotations
        why = table["why"].to_numpy()
        location = {name: table[name][0].as_py() for name in ("frame", *LANE)}
        repeated = table.filter(pa.array(why >= FOR_REPEATS))
        buckets = (repeated["number"].to_numpy() - 1) // BUCKET
        rows_by_bucket = (repeated.filter(pa.array(buckets == bucket)) for bucket in np.unique(buckets))
        repeated_ranges = [{**location, **repeat} for rows in rows_by_bucket for repeat in repeats(rows, ids=max_ids)]
        for_ids = table.filter(pa.array(why % FOR_REPEATS == FOR_ID))
        columns = {
            **{name: for_ids[name] for name in LANE},
            "kind": pa.array([""] * len(for_ids)),
            "first": for_ids["number"],
            "ids": pa.ListArray.from_arrays(np.arange(len(for_ids) + 1, dtype=np.int32), for_ids["message_id"].combine_chunks()),
        }
        return pa.concat_tables([pa.Table.from_pylist(repeated_ranges, LOOKED_UP), pa.table(columns)], promote_options="default")

    return look_up


def _repeat_finding(row: Mapping[str, Any]) -> Breach:
    range_size = row["last"] - row["first"] + 1
    return Breach(
        FindingKind(row["kind"]),
        next(stage for stage, frame in FRAME_OF.items() if frame == row["frame"]),
        *(row["topic"], row["source"], row["lane"], row["consumer_group"]),
        first=row["first"],
        last=row["last"],
        count=row["n"],
        detail=f"{row['numbers']} of these {range_size} numbers" if row["numbers"] < range_size else "",
        ids=tuple(row["ids"]),
    )


def _with_ids(config: PipelineConfig, finding: Breach, ids: Mapping[NumberKey, str]) -> Breach:
    if finding.lane < 0 or finding.ids or finding.kind in KINDS_WITHOUT_IDS:
        return finding
    numbers: Sequence[int] = range(finding.first, min(finding.last, finding.first + config.ids_per_finding - 1) + 1)
    known_ids = [ids[key] for number in numbers if (key := (finding.source, finding.topic, finding.lane, number)) in ids]
    return replace(finding, ids=tuple(known_ids)) if known_ids else finding

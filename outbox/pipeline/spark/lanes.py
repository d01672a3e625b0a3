"""
How a lost message gets its name: which numbers of a lane are missing at a stage or there more than
once, and which messages these are.

    rows of all frames -> cells, a bitmap of 32,768 numbers for each role -> sets of a bucket -> ranges of numbers -> ids

    role    numbers of the bucket       sent - broker = {3}: lost at the broker
    SENT    1 2 3 4 5                   broker - handled = {5}: lost at the inbox of the group
    broker  1 2   4 5                   assigned 1 to 6, and 6 has no role: lost at the outbox
    handled 1 2   4

    lost at the broker, number 3  -- rows of the frame places -->  its id
    number 7 is repeated          -- rows of the frame broker -->  one message twice, or two messages: RENUMBERED

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
    BROKERS_OF,
    BUCKET,
    CELL,
    COLUMNS,
    HIGHEST,
    LANE,
    NONE,
    OF_LANE,
    PLACES_OF,
    SENT_OF,
    Cell,
    Cells,
    InGroup,
    LaneName,
    Roles,
    Seen,
    lanes_of,
    micros,
    of_group,
    roles_of,
    runs_of,
    unpack,
    unread,
)
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import NO_SUCH_LANE, NUMBERS_WITHOUT_LANE, Breach, FindingKind, Report, Stage, merge
from outbox.pipeline.spark.history import History, Mark, Recorded
from outbox.pipeline.spark.scan import Bools, Ints, collected, ddl, integers, micros_of, scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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


class RangeResult(NamedTuple):
    """A result about a range of numbers. With `kind` None it is a count named `what`, from the number `first` on."""

    kind: FindingKind | None
    stage: Stage
    what: str
    first: int
    last: int
    n: int


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


RESULT = pa.schema(
    [
        *OF_LANE,
        *((name, pa.string()) for name in ("kind", "stage", "what")),
        *((name, pa.int64()) for name in ("first", "last", "n")),
    ]
)
IS_SEEN = "bucket"  # a result of this kind says only that the bucket has rows
IS_UNKNOWN = "unknown"  # the lane has no mark; `what` is a role

NO_NUMBER = {
    "places": Seen.NO_NUMBER_PLACE,
    "broker": Seen.NO_NUMBER_BROKER,
    "inbox": Seen.NO_NUMBER_INBOX,
    "failed_deliveries": Seen.NO_NUMBER_INBOX,
}


def audit_lanes(spark: SparkSession, config: PipelineConfig, history: History) -> Report:
    """Compare all stages of all lanes. Findings have no ids; DUPLICATED means a repeated number, whatever its messages are."""
    marks = history.marks_list()
    result = Report()
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
    return collected(by_bucket.mapInArrow(_judge_batches(lanes), ddl(RESULT)))


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
    for result in judge(lanes[name], bucket, roles_in(cells)):
        yield *name, *result


def _unknown_lanes(history: History, rows: list[Any], result: Report) -> list[Mark]:
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


def _collect(result: Report, config: PipelineConfig, history: History, marks: Sequence[Mark], rows: list[Any]) -> None:
    by_lane = {(mark.source, mark.topic, mark.lane): mark for mark in marks}
    counts: dict[str, Counter[str]] = {mark.topic: Counter() for mark in marks}
    buckets: dict[Mark, set[int]] = {mark: set() for mark in marks}
    findings = []
    for row in rows:
        if row.kind == IS_UNKNOWN:
            continue
        mark = by_lane[row.source, row.topic, row.lane]
        if row.kind == IS_SEEN:
            buckets[mark].add(row.first)
        elif row.kind is None:
            counts[mark.topic][row.what] += row.n
        else:
            findings.append(_finding(mark, row, history.recorded.get(mark.topic)))
    for mark in marks:
        counts[mark.topic]["assigned"] += max(0, mark.last - mark.first + 1)
        findings += _absent_buckets(mark, buckets[mark])
    result.counts = {topic: dict(of_topic) for topic, of_topic in counts.items()}
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
            place = FindingKind.LOST, Stage.OUTBOX, mark.topic, mark.source, mark.lane
            yield Breach(*place, first=first, last=gap_end - 1, count=gap_end - first)
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


LANE_SHIFT = 49
BEFORE_ALL = np.iinfo(np.int64).min


def index_of(ranges: Mapping[LaneName, Iterable[tuple[int, int]]]) -> Index:
    """Return an index of ranges of numbers, first to last, for look-ups of millions of numbers."""
    codes = {lane: code for code, lane in enumerate(ranges)}
    spans = [(code, first, last) for lane, code in codes.items() for first, last in _merged(ranges[lane])]
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
            found = [row for row in of_group if (len(row["message_id_distinct"]) == 1) == (kind is FindingKind.DUPLICATED)]
            for first, last, of_span in _spans(found):
                yield {
                    "consumer_group": group,
                    "kind": kind.value,
                    "first": first,
                    "last": last,
                    "numbers": len(of_span),
                    "n": sum(
                        row["message_id_count"] - 1 if kind is FindingKind.DUPLICATED else len(row["message_id_distinct"])
                        for row in of_span
                    ),
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


NumberKey = tuple[str, str, int, int]
Ranges = dict[str, dict[LaneName, list[tuple[int, int]]]]  # frame -> lane -> first and last numbers

FRAME_OF = {Stage.OUTBOX: "places", Stage.BROKER: "broker", Stage.INBOX: "inbox"}
NAMELESS = (FindingKind.UNKNOWN_LANE, FindingKind.NO_NUMBER, FindingKind.CLOCK)
BUCKETS_AT_ONCE = 8  # a group costs Spark more than its rows cost, but the rows of all repeated numbers are in memory
NAMED, REPEATED = 1, 2  # why a row is looked up; the sum means both

ROW = pa.schema(
    [
        ("frame", pa.string()),
        *OF_LANE,
        *((name, pa.int64()) for name in ("number", "part")),
        *((name, pa.string()) for name in ("consumer_group", "message_id")),
        ("why", pa.int8()),
    ]
)

FOUND = pa.schema(
    [
        ("frame", pa.string()),
        *OF_LANE,
        *((name, pa.string()) for name in ("consumer_group", "kind")),
        *((name, pa.int64()) for name in ("first", "last", "numbers", "n")),
        ("ids", pa.list_(pa.string())),
    ]
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
    indexes = ({frame: index_of(ranges) for frame, ranges in wanted.items()} for wanted in (named, repeated))
    rows = scan(spark, history, columns, _row_filter(*indexes), ROW)
    looked_up = rows.groupBy("frame", *LANE, "part").applyInArrow(_look_up(config.ids_per_finding), ddl(FOUND)).toArrow()
    dirty = {_where(finding) for finding in findings if _is_repeated(finding)}
    found = [finding for finding in findings if not _is_repeated(finding)]
    is_name = pc.equal(looked_up["kind"], "")
    repeats_found = map(_repeat, looked_up.filter(pc.invert(is_name)).to_pylist())
    found += [repeat for repeat in repeats_found if _where(repeat) in dirty]
    names = looked_up.filter(is_name)
    numbers = zip(*(names[name].to_pylist() for name in (*LANE, "first")), strict=True)
    ids = dict(zip(numbers, pc.list_flatten(names["ids"]).to_pylist(), strict=True))  # one for each number
    return [_with_ids(config, finding, ids) for finding in merge(found)]


def _is_repeated(one: Breach) -> bool:
    return one.kind is FindingKind.DUPLICATED and one.lane >= 0


def _where(one: Breach) -> tuple[Any, ...]:
    return one.stage, one.source, one.topic, one.lane, one.group


def _wanted(config: PipelineConfig, findings: Iterable[Breach]) -> tuple[Ranges, Ranges]:
    """Return the numbers to look up, by frame and lane: those whose ids are wanted, and repeated ones."""
    named: Ranges = defaultdict(lambda: defaultdict(list))
    repeated: Ranges = defaultdict(lambda: defaultdict(list))
    for finding in findings:
        lane = (finding.source, finding.topic, finding.lane)
        if _is_repeated(finding):
            repeated[FRAME_OF[finding.stage]][lane].append((finding.first, finding.last))
        elif not (
            finding.lane < 0 or finding.kind in NAMELESS or (finding.kind is FindingKind.LOST and finding.stage is Stage.OUTBOX)
        ):
            last = min(finding.last, finding.first + config.ids_per_finding - 1)
            for frame in _where_to_look(finding):
                named[frame][lane].append((finding.first, last))
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
    part = pa.array((number - 1) // (BUCKET * BUCKETS_AT_ONCE))
    columns = [pa.array([frame] * len(number)), *lane, pa.array(number), part, group, rows.column("message_id")]
    return pa.RecordBatch.from_arrays([*columns, pa.array(why[why > 0])], schema=ROW)


def _look_up(ids: int) -> Any:
    """Return a function that returns the message of each wanted number in some buckets, and their repeated numbers."""

    def look_up(table: pa.Table) -> pa.Table:  # Spark needs the annotations
        why = table["why"].to_numpy()
        place = {name: table[name][0].as_py() for name in ("frame", *LANE)}
        repeated = table.filter(pa.array(why >= REPEATED))
        buckets = (repeated["number"].to_numpy() - 1) // BUCKET
        of_buckets = (repeated.filter(pa.array(buckets == bucket)) for bucket in np.unique(buckets))
        found = [{**place, **repeat} for rows in of_buckets for repeat in repeats(rows, ids=ids)]
        named = table.filter(pa.array(why % REPEATED == NAMED))
        columns = {
            **{name: named[name] for name in LANE},
            "kind": pa.array([""] * len(named)),
            "first": named["number"],
            "ids": pa.ListArray.from_arrays(np.arange(len(named) + 1, dtype=np.int32), named["message_id"].combine_chunks()),
        }
        return pa.concat_tables([pa.Table.from_pylist(found, FOUND), pa.table(columns)], promote_options="default")

    return look_up


def _repeat(row: Mapping[str, Any]) -> Breach:
    span = row["last"] - row["first"] + 1
    return Breach(
        FindingKind(row["kind"]),
        next(stage for stage, frame in FRAME_OF.items() if frame == row["frame"]),
        *(row["topic"], row["source"], row["lane"], row["consumer_group"]),
        first=row["first"],
        last=row["last"],
        count=row["n"],
        detail=f"{row['numbers']} of these {span} numbers" if row["numbers"] < span else "",
        ids=tuple(row["ids"]),
    )


def _with_ids(config: PipelineConfig, one: Breach, ids: Mapping[NumberKey, str]) -> Breach:
    if one.lane < 0 or one.ids or one.kind in NAMELESS:
        return one
    span: Sequence[int] = range(one.first, min(one.last, one.first + config.ids_per_finding - 1) + 1)
    found = [ids[key] for number in span if (key := (one.source, one.topic, one.lane, number)) in ids]
    return replace(one, ids=tuple(found)) if found else one

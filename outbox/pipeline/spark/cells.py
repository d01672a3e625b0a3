"""
Determine the role of each row, which is what the row proves about its message, and collect the numbers of each role as bitmaps.

    places, state sent, older than the settle time, numbers 1 and 3  ->  role SENT, bits 101
    places, sent before the recorder began                           ->  role UNSEEN
    inbox, group "cart"                                              ->  role HANDLED of the group with this index

A bucket is a range of 32,768 numbers of a lane. A cell is the bitmap of the numbers that have one role in one bucket. So a stage
of ten million rows sends a few hundred cells through the shuffle. A role is a small integer, so that one aggregation serves all
stages and groups. The frames (places, broker, …) are defined in `history.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from outbox.pipeline.spark.config import AuditedGroup, PipelineConfig
from outbox.pipeline.spark.history import History, RecordedTimes
from outbox.pipeline.spark.scan import Bools, Ints, coded, distinct, integers, micros_of


class Role(enum.IntEnum):
    """Roles that do not depend on a group. A young message is not older than the settle time."""

    SENT = 0
    SENT_YOUNG = 1
    OPEN = 2  # young, and not sent yet: claimed, prepared or released
    OPEN_LATE = 3  # the same, but older than the settle time
    GONE = 4  # dead or discarded, so it reaches no later stage
    STORED = 5  # at the broker
    STORED_YOUNG = 6
    FOREIGN_GROUP = 7  # in the inbox of a group that is not audited
    NO_NUMBER_PLACE = 8  # in the outbox, with a number that no lane can assign
    NO_NUMBER_BROKER = 9  # the same at the broker
    NO_NUMBER_INBOX = 10  # the same in the inbox of a group
    UNSEEN = 11  # sent before the recorder began, so the broker may have it without a record
    UNREAD = 12  # sent, not young, and the recorder has not read that far yet


class GroupRole(enum.IntEnum):
    """Roles of a message in one audited group; `group_role` returns their integers."""

    HANDLED = 0
    DEAD_LETTER = 1
    WAITING = 2  # deferred, or not delivered yet: the broker still has it for the group
    NOT_OWED = 3  # sent before the group is known to have subscribed, so the group need not have handled it
    DISCARDED = 4  # by an operator


# The columns that determine roles.
COLUMNS = {
    "places": ("topic", "state", "claimed_at", "at"),
    "broker": ("topic", "at"),
    "inbox": ("consumer_group", "at"),
    "failed_deliveries": ("consumer_group", "outcome", "at"),
}

# Outcomes that are the state of a message in a group. Other outcomes are log entries about single deliveries.
DEAD, DISCARDED = "dead", "discarded"
WAITING = ("deferred", "waiting")

NO_ROLE = -1
FAR_FUTURE = np.iinfo(np.int64).max  # replaces a missing time, so that the row counts as young
FIRST_GROUP_ROLE = 16
MAX_GROUPS = (1024 - FIRST_GROUP_ROLE) // len(GroupRole)

SENT_ROLES = frozenset({Role.SENT, Role.SENT_YOUNG, Role.UNSEEN, Role.UNREAD})
OUTBOX_ROLES = SENT_ROLES | {Role.OPEN, Role.OPEN_LATE, Role.GONE}
BROKER_ROLES = frozenset({Role.STORED, Role.STORED_YOUNG})


def group_role(group: int, role: GroupRole) -> int:
    """Return the integer of a group's role; groups count from 0."""
    return FIRST_GROUP_ROLE + group * len(GroupRole) + role


@dataclass(frozen=True)
class RecordedSpan:
    """
    The span of time for which the history has a topic's messages at the broker, in microseconds since 1970.

    Args:
        began, until: messages that became visible between these times are in the history, if the broker has them.
        hidden: the maximum time from sending a message until it becomes visible at the broker; 0 except for delayed messages.
        is_by_claim: compare `began` with the time of a message's claim. The time at which it was marked as sent may be long after
            the broker stored it.
    """

    began: int
    until: int
    hidden: int
    is_by_claim: bool = False


@dataclass(frozen=True)
class RoleRules:
    """
    Determines the roles of rows, for the audited groups.

    Args:
        groups: the audited groups; `group_role` takes their indexes.
        cutoff_micros: messages with a later time are young.
        recorded_spans: topic -> its span, for topics whose messages at the broker are not all in the history.
        owed: (group, topic) -> the time in microseconds since which the group must have handled messages; missing: always.
    """

    groups: Sequence[AuditedGroup]
    cutoff_micros: int
    recorded_spans: Mapping[str, RecordedSpan] = field(default_factory=dict)
    owed: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def of(self, frame: str, batch: pa.RecordBatch) -> Iterator[Ints]:
        """Yield arrays with a role, or NO_ROLE, for each row of a frame. There are several if a row can have several roles."""
        match frame:
            case "places":
                yield self._of_places(batch)
                for index, is_not_owed in self.not_owed(batch):
                    yield np.where(is_not_owed, group_role(index, GroupRole.NOT_OWED), NO_ROLE)
            case "broker":
                is_old = micros_of(batch, "at", missing=FAR_FUTURE) <= self.cutoff_micros
                yield np.where(is_old, Role.STORED, Role.STORED_YOUNG)
            case "inbox":
                yield self._by_group(batch, GroupRole.HANDLED)
            case "failed_deliveries":
                yield self._of_failed_deliveries(batch)

    def of_sent(self, batch: pa.RecordBatch) -> Ints:
        """Return the roles that the rows of the frame `places` have if their messages were sent."""
        at = micros_of(batch, "at", "claimed_at", missing=FAR_FUTURE)
        claimed_at = micros_of(batch, "claimed_at", "at", missing=FAR_FUTURE)
        topic = coded(batch, "topic")
        roles = np.where(at <= self.cutoff_micros, Role.SENT, Role.SENT_YOUNG)
        for name, span in self.recorded_spans.items():
            is_earlier = (claimed_at if span.is_by_claim else at) < span.began
            # A delayed message may not have become visible before `until`, so the recorder could not receive it.
            may_be_hidden = (at > span.until - span.hidden) & (span.hidden > 0)
            cases = {  # the first one that applies decides
                Role.SENT_YOUNG: (at > self.cutoff_micros) | (may_be_hidden & is_earlier),
                Role.UNSEEN: is_earlier,
                Role.UNREAD: at > span.until,
            }
            recorded = np.select([*cases.values(), may_be_hidden], [*cases, Role.SENT_YOUNG], Role.SENT)
            roles = np.where(topic.is_(name), recorded, roles)
        return roles

    def not_owed(self, batch: pa.RecordBatch) -> Iterator[tuple[int, Bools]]:
        """Yield a group's index, and for each row whether the group need not have handled its message."""
        if not self.owed:
            return
        at, topic = micros_of(batch, "at", "claimed_at", missing=FAR_FUTURE), coded(batch, "topic")
        for index, group in enumerate(self.groups):
            for name in group.topics:
                if (begin := self.owed.get((group.name, name))) and (is_not_owed := topic.is_(name) & (at < begin)).any():
                    yield index, is_not_owed

    def _of_places(self, batch: pa.RecordBatch) -> Ints:
        state = coded(batch, "state")
        is_late = micros_of(batch, "claimed_at", "at", missing=FAR_FUTURE) <= self.cutoff_micros
        under_way = np.where(is_late, Role.OPEN_LATE, Role.OPEN)
        otherwise = np.where(state.is_("dead", "discarded"), Role.GONE, under_way)
        return np.where(state.is_("sent"), self.of_sent(batch), otherwise)

    def _of_failed_deliveries(self, batch: pa.RecordBatch) -> Ints:
        outcome = coded(batch, "outcome")
        cases = {
            GroupRole.DEAD_LETTER: outcome.is_(DEAD),
            GroupRole.DISCARDED: outcome.is_(DISCARDED),
            GroupRole.WAITING: outcome.is_(*WAITING),
        }
        roles = np.select([*cases.values()], [self._by_group(batch, role) for role in cases], NO_ROLE)
        return np.where(roles == Role.FOREIGN_GROUP, NO_ROLE, roles)

    def _by_group(self, batch: pa.RecordBatch, role: GroupRole) -> Ints:
        roles = {group.name: group_role(index, role) for index, group in enumerate(self.groups)}
        return coded(batch, "consumer_group").each(lambda name: roles.get(name, Role.FOREIGN_GROUP))


def role_rules(config: PipelineConfig, history: History) -> RoleRules:
    """Return the rules for this history: its settle time, its groups, and the spans that the broker's messages cover."""
    cutoff = (history.brokers_as_of or history.as_of) - timedelta(seconds=config.settle_seconds)
    owed = {pair: micros(time) for pair, time in history.owed.items()}
    return RoleRules(config.groups, micros(cutoff), recorded_spans(config, history), owed)


def recorded_spans(config: PipelineConfig, history: History) -> dict[str, RecordedSpan]:
    """Return the spans of topics whose messages at the broker are not all known, shortened by the clock tolerance."""
    tolerance = timedelta(seconds=config.clock_tolerance_seconds)
    spans = {}
    kafka_topics = {topic for cluster in config.kafka for topic in cluster.topics}
    for topic in {**config.recorded, **history.recorded}:
        hidden_seconds = config.recorded.get(topic, 0.0)
        recorded = history.recorded.get(topic, RecordedTimes(history.as_of, None))
        began = recorded.began + tolerance
        until = began if recorded.until is None else recorded.until - tolerance
        spans[topic] = RecordedSpan(micros(began), micros(until), int(hidden_seconds * 1_000_000), topic in kafka_topics)
    return spans


def unread_detail(recorded: RecordedTimes | None) -> str:
    """Return the detail of a finding about sent messages that the history cannot contain yet, even if the broker has them."""
    if recorded is not None and recorded.why:
        return recorded.why
    if recorded is None or recorded.until is None:
        return "not recorded yet; make sure that manage.py outbox_record is running"
    until = recorded.until.isoformat(timespec="seconds")
    return f"recorded only up to {until}; make sure that manage.py outbox_record is running"


def micros(time: datetime) -> int:
    """Return a time in microseconds since 1970."""
    return int(time.timestamp() * 1_000_000)


BUCKET = 32_768
HIGHEST = BUCKET << 34  # the highest possible number: with it, lane, role and bucket still fit into one integer
CELLS_AT_ONCE = 256  # limits memory, since a cell needs a byte per number while it is filled

LANE = ("source", "topic", "lane")
LANE_FIELDS = [("source", pa.string()), ("topic", pa.string()), ("lane", pa.int16())]
LaneName = tuple[str | None, str | None, int | None]

CELL = pa.schema(
    [
        *LANE_FIELDS,
        ("role", pa.int32()),
        ("bucket", pa.int64()),
        ("bits", pa.binary()),
        ("repeated", pa.binary()),
        *((name, pa.int64()) for name in ("n", "lowest", "highest", "future")),
    ]
)

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


@dataclass(frozen=True)
class Cell:
    """
    The numbers of one lane in one role and bucket.

    Args:
        bits: which numbers are present, packed to bits or unpacked to booleans.
        repeated: which of them are present more than once, in the same form.
        n: the number of rows.
        lowest, highest: the lowest and highest number.
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
    Collects rows of a frame into cells.

    Args:
        no_number: the role of rows whose number no lane can assign (below 1, or above `HIGHEST`).
    """

    def __init__(self, no_number: int) -> None:
        self._no_number = no_number
        self._cells: dict[tuple[LaneName, int, int], Cell] = {}

    def add(self, lanes: Ints, names: list[LaneName], roles: Ints, numbers: Ints, future: Bools) -> None:
        """
        Add rows; the arrays have a value for each row.

        Args:
            lanes: the index of the lane in `names`.
            future: whether the row's time is in the future.
        """
        is_number = (numbers >= 1) & (numbers <= HIGHEST)
        are_all_numbers = bool(is_number.all())
        index = numbers - 1
        if not are_all_numbers:
            index, roles = np.where(is_number, index, 0), np.where(is_number, roles, self._no_number)
        keys, cells = _cells_of(lanes, roles, index >> 15)
        rows = np.bincount(cells, minlength=len(keys))
        futures = np.bincount(cells[future], minlength=len(keys))
        for first in range(0, len(keys), CELLS_AT_ONCE):
            inside = slice(None) if len(keys) <= CELLS_AT_ONCE else (cells >= first) & (cells < first + CELLS_AT_ONCE)
            count = min(CELLS_AT_ONCE, len(keys) - first)
            flags, repeated = _flags(cells[inside] - first, index[inside] & (BUCKET - 1), rows[first : first + count])
            for n in range(count):
                lane, role, bucket = keys[first + n]
                if are_all_numbers:
                    start = bucket * BUCKET + 1
                    lowest, highest = start + int(flags[n].argmax()), start + BUCKET - 1 - int(flags[n][::-1].argmax())
                else:
                    numbers_of_cell = numbers[cells == first + n]
                    lowest, highest = int(numbers_of_cell.min()), int(numbers_of_cell.max())
                cell = Cell(
                    _packed(flags[n]), _packed(repeated[n]), int(rows[first + n]), lowest, highest, int(futures[first + n])
                )
                key = names[lane], role, bucket
                self._cells[key] = self._cells[key] | cell if key in self._cells else cell

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield a batch with a row for each cell."""
        rows = [
            {
                **dict(zip(LANE, name, strict=True)),
                "role": role,
                "bucket": bucket,
                "bits": cell.bits.tobytes(),
                "repeated": _bytes_or_none(cell.repeated),
                "n": cell.n,
                "lowest": cell.lowest,
                "highest": cell.highest,
                "future": cell.future,
            }
            for (name, role, bucket), cell in self._cells.items()
        ]
        yield pa.RecordBatch.from_pylist(rows, CELL)


def lanes_of(batch: pa.RecordBatch) -> tuple[Ints, list[LaneName]]:
    """Return each row's lane, as an index into the list of lanes that is also returned."""
    source, topic = coded(batch, "source"), coded(batch, "topic")
    lane, has_lane = integers(batch, "lane")
    # Lanes are smallints. Shifted to be positive, they are less than 2^16, which stands for NULL.
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
    low, role_count = int(buckets.min()), int(roles.max()) + 1
    span = int(buckets.max()) - low + 1
    keys, cells = distinct((lanes * role_count + roles) * span + (buckets - low))
    return [(*divmod(key // span, role_count), key % span + low) for key in keys.tolist()], cells


def unpack(bits: bytes | Bytes) -> Bools:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)


def _packed(flags: Bools) -> Bytes:
    return np.packbits(flags, bitorder="little")


def _bytes_or_none(bits: Bytes) -> bytes | None:
    return bits.tobytes() if bits.any() else None


def _flags(cells: Ints, positions: Ints, rows: Ints) -> tuple[Bools, Bools]:
    """Return for each cell which positions in its bucket are present, and which are repeated."""
    spots = cells * BUCKET + positions
    flags: Bools = np.zeros((len(rows), BUCKET), bool)
    flags.reshape(-1)[spots] = True
    repeated = np.zeros_like(flags)
    has_repeats = rows > np.count_nonzero(flags, axis=1)
    if has_repeats.any():
        in_repeats = has_repeats[cells]
        distinct_spots, n = np.unique(spots[in_repeats], return_counts=True)
        repeated.reshape(-1)[distinct_spots[n > 1]] = True
    return flags, repeated


MAX_RUNS = 1_000  # of one kind in a bucket; if there are more ranges, they are reported as one range with gaps


def runs_of(wrong: Bools) -> list[tuple[int, int, int]]:
    """Return ranges of consecutive positions as (first, last, count); one range if there are more than `MAX_RUNS`."""
    positions = np.flatnonzero(wrong)
    if len(positions) == 0:
        return []
    starts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) > 1)
    if len(starts) > MAX_RUNS:
        return [(int(positions[0]), int(positions[-1]), len(positions))]
    ends: Ints = np.append(starts[1:], len(positions)) - 1
    return [(int(positions[a]), int(positions[b]), int(b - a + 1)) for a, b in zip(starts, ends, strict=True)]

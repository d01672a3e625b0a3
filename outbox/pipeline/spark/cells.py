"""
What a row says of its message, its role; and the numbers of a lane in one role, as bitmaps.

    places, state sent, older than the settle time, numbers 1 and 3  ->  role SENT, bits 101
    places, sent before the recorder began                           ->  role UNSEEN
    inbox, group "cart"                                              ->  role HANDLED of the group with this index

A role is a small integer, so one aggregation serves all stages and groups. A cell holds 32,768 numbers, so a stage of ten million
rows sends a few hundred of them through the shuffle.
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
from outbox.pipeline.spark.history import History, Recorded
from outbox.pipeline.spark.scan import Bools, Ints, coded, distinct, integers, micros_of


class Seen(enum.IntEnum):
    """Roles that exist once. Young: not older than the settle time."""

    SENT = 0
    SENT_YOUNG = 1
    OPEN = 2  # claimed, prepared or released, young
    OPEN_LATE = 3
    GONE = 4  # dead or discarded, so that it is not at any later stage
    STORED = 5  # at the broker
    STORED_YOUNG = 6
    FOREIGN_GROUP = 7  # in the inbox of a group that is not audited
    NO_NUMBER_PLACE = 8
    NO_NUMBER_BROKER = 9
    NO_NUMBER_INBOX = 10
    UNSEEN = 11  # sent before the recorder began, so the broker may have it without a record
    UNREAD = 12  # sent, not young, and not recorded yet


class InGroup(enum.IntEnum):
    """Roles that exist for each group."""

    HANDLED = 0
    DEAD_LETTER = 1
    WAITING = 2  # deferred, or not delivered yet: the broker still has it for the group
    NOT_OWED = 3  # maybe not meant for the group
    DISCARDED = 4  # by an operator


# The columns that determine roles.
COLUMNS = {
    "places": ("topic", "state", "claimed_at", "at"),
    "broker": ("topic", "at"),
    "inbox": ("consumer_group", "at"),
    "failed_deliveries": ("consumer_group", "outcome", "at"),
}

# States of messages in a group. Other outcomes of deliveries are its log, and say nothing of their messages.
DEAD, DISCARDED = "dead", "discarded"
WAITING = ("deferred", "waiting")

NONE = -1
NEVER = np.iinfo(np.int64).max  # stands for a missing time, so the row counts as young
FIRST_OF_GROUPS = 16
MAX_GROUPS = (1024 - FIRST_OF_GROUPS) // len(InGroup)

SENT_OF = frozenset({Seen.SENT, Seen.SENT_YOUNG, Seen.UNSEEN, Seen.UNREAD})
PLACES_OF = SENT_OF | {Seen.OPEN, Seen.OPEN_LATE, Seen.GONE}
BROKERS_OF = frozenset({Seen.STORED, Seen.STORED_YOUNG})


def of_group(group: int, role: InGroup) -> int:
    """Return the integer of a group's role; groups count from 0."""
    return FIRST_OF_GROUPS + group * len(InGroup) + role


@dataclass(frozen=True)
class Reach:
    """
    The times between which the messages of a topic are recorded, in microseconds.

    Args:
        began, until: messages that became visible between these times are recorded, if the broker has them.
        hidden: the maximum time from sending a message until it is visible.
        is_by_claim: it began with messages claimed then, and not with those marked as sent then, which may be stored for long.
    """

    began: int
    until: int
    hidden: int
    is_by_claim: bool = False


@dataclass(frozen=True)
class Roles:
    """
    Determines the roles of rows, for the audited groups.

    Args:
        reaches: topic -> its reach, for topics that are not recorded for all times.
        owed: (group, topic) -> from when on the group must have handled messages, in microseconds; missing: always.
    """

    groups: Sequence[AuditedGroup]
    cutoff_micros: int
    reaches: Mapping[str, Reach] = field(default_factory=dict)
    owed: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def of(self, frame: str, batch: pa.RecordBatch) -> Iterator[Ints]:
        """Yield a role for each row of a frame, or NONE; several arrays if rows can have several roles."""
        match frame:
            case "places":
                yield self._of_places(batch)
                for index, is_not_owed in self.not_owed(batch):
                    yield np.where(is_not_owed, of_group(index, InGroup.NOT_OWED), NONE)
            case "broker":
                is_old = micros_of(batch, "at", missing=NEVER) <= self.cutoff_micros
                yield np.where(is_old, Seen.STORED, Seen.STORED_YOUNG)
            case "inbox":
                yield self._by_group(batch, InGroup.HANDLED)
            case "failed_deliveries":
                yield self._of_failed_deliveries(batch)

    def of_sent(self, batch: pa.RecordBatch) -> Ints:
        """Return the roles of places, assuming that all of them were sent."""
        at = micros_of(batch, "at", "claimed_at", missing=NEVER)
        claimed_at = micros_of(batch, "claimed_at", "at", missing=NEVER)
        topic = coded(batch, "topic")
        roles = np.where(at <= self.cutoff_micros, Seen.SENT, Seen.SENT_YOUNG)
        for name, reach in self.reaches.items():
            is_earlier = (claimed_at if reach.is_by_claim else at) < reach.began
            may_be_hidden = (at > reach.until - reach.hidden) & (reach.hidden > 0)
            cases = {
                Seen.SENT_YOUNG: (at > self.cutoff_micros) | (may_be_hidden & is_earlier),
                Seen.UNSEEN: is_earlier,
                Seen.UNREAD: at > reach.until,
            }
            recorded = np.select([*cases.values(), may_be_hidden], [*cases, Seen.SENT_YOUNG], Seen.SENT)
            roles = np.where(topic.is_(name), recorded, roles)
        return roles

    def not_owed(self, batch: pa.RecordBatch) -> Iterator[tuple[int, Bools]]:
        """Yield a group's index, and which places are of messages that it need not have handled."""
        if not self.owed:
            return
        at, topic = micros_of(batch, "at", "claimed_at", missing=NEVER), coded(batch, "topic")
        for index, group in enumerate(self.groups):
            for name in group.topics:
                if (begin := self.owed.get((group.name, name))) and (found := topic.is_(name) & (at < begin)).any():
                    yield index, found

    def _of_places(self, batch: pa.RecordBatch) -> Ints:
        state = coded(batch, "state")
        is_long_open = micros_of(batch, "claimed_at", "at", missing=NEVER) <= self.cutoff_micros
        under_way = np.where(is_long_open, Seen.OPEN_LATE, Seen.OPEN)
        otherwise = np.where(state.is_("dead", "discarded"), Seen.GONE, under_way)
        return np.where(state.is_("sent"), self.of_sent(batch), otherwise)

    def _of_failed_deliveries(self, batch: pa.RecordBatch) -> Ints:
        outcome = coded(batch, "outcome")
        cases = {
            InGroup.DEAD_LETTER: outcome.is_(DEAD),
            InGroup.DISCARDED: outcome.is_(DISCARDED),
            InGroup.WAITING: outcome.is_(*WAITING),
        }
        roles = np.select([*cases.values()], [self._by_group(batch, role) for role in cases], NONE)
        return np.where(roles == Seen.FOREIGN_GROUP, NONE, roles)

    def _by_group(self, batch: pa.RecordBatch, role: InGroup) -> Ints:
        roles = {group.name: of_group(index, role) for index, group in enumerate(self.groups)}
        return coded(batch, "consumer_group").each(lambda name: roles.get(name, Seen.FOREIGN_GROUP))


def roles_of(config: PipelineConfig, history: History) -> Roles:
    """Return the rules by which rows become roles: the settle time, and the progress of the recorder."""
    cutoff = (history.brokers_as_of or history.as_of) - timedelta(seconds=config.settle_seconds)
    owed = {pair: micros(time) for pair, time in history.owed.items()}
    return Roles(config.groups, micros(cutoff), reaches(config, history), owed)


def reaches(config: PipelineConfig, history: History) -> dict[str, Reach]:
    """Return the reach of each topic that is not known for all times, reduced by the clocks' tolerance."""
    tolerance = timedelta(seconds=config.clock_tolerance_seconds)
    found = {}
    of_kafka = {topic for cluster in config.kafka for topic in cluster.topics}
    for topic in {**config.recorded, **history.recorded}:
        hidden_seconds = config.recorded.get(topic, 0.0)
        recorded = history.recorded.get(topic, Recorded(history.as_of, None))
        began = recorded.began + tolerance
        until = began if recorded.until is None else recorded.until - tolerance
        found[topic] = Reach(micros(began), micros(until), int(hidden_seconds * 1_000_000), topic in of_kafka)
    return found


def unread(recorded: Recorded | None) -> str:
    """Return the detail of a finding about messages of which it is not known yet whether the broker has them."""
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
HIGHEST = BUCKET << 34  # so that lane, role and bucket fit into one integer
CELLS_AT_ONCE = 256  # limits memory: each needs a byte per number for a moment

LANE = ("source", "topic", "lane")
OF_LANE = [("source", pa.string()), ("topic", pa.string()), ("lane", pa.int16())]
LaneName = tuple[str | None, str | None, int | None]

CELL = pa.schema(
    [
        *OF_LANE,
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
                if all_are:
                    before = bucket * BUCKET + 1
                    lowest, highest = before + int(flags[n].argmax()), before + BUCKET - 1 - int(flags[n][::-1].argmax())
                else:
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

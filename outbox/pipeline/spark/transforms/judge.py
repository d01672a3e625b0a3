"""
Compare the stages of one bucket of one lane, as sets of numbers, with NumPy only. docs/pipeline.md explains the rules.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from outbox.pipeline.spark.findings import FindingKind, Stage
from outbox.pipeline.spark.transforms.columns import Bools, Ints
from outbox.pipeline.spark.transforms.numbers import BUCKET, Cell, unpack
from outbox.pipeline.spark.transforms.roles import BROKERS_OF, PLACES_OF, SENT_OF, InGroup, Seen, of_group

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
    sets = {role: found.bits & is_audited for role, found in roles.items()}

    def of(wanted: Iterable[int]) -> Bools:
        found: Bools = np.zeros(BUCKET, bool)
        for role in wanted:
            if role in sets:
                found |= sets[role]
        return found

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
        for what, found in ((DEAD_LETTERS_OF, dead), (DISCARDED_BY, discarded), (UNREAD_BY, waiting)):
            yield _count(Stage.INBOX, f"{what}{name}", found)
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
        found = [roles[role] for role in wanted if role in roles]
        if found:
            yield stage, what, reduce(operator.or_, found).repeated


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

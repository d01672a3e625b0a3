"""What an audit finds: exact to the message, and the same words whoever looked (Spark, SQL, plain Python)."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

STRANDED = "no ticket, delayed row or batch names it: nothing would ever send it"
ROW_GONE = "its message row is gone"
SEVERAL_PLACES = "it stands in several places at once"
NO_MESSAGE = "no message was published for it"
NO_ROW = "its business row is gone"
NOT_SENT = "not sent yet"
NO_SUCH_TOPIC = "they name topic {number}, whose row in outbox_topic is gone: bring it back from a copy"
NUMBERS_WITHOUT_LANE = "they have numbers, and no lane"
NO_SUCH_LANE = "the outbox knows no such lane; its row in outbox_lane is gone, or it is another database's"


class Kind(enum.StrEnum):
    """What is wrong."""

    LOST = "lost"  # it should be at this stage and is not
    ORPHAN = "orphan"  # it is at this stage, and nothing before says why
    DUPLICATED = "duplicated"  # the same message is there more than once
    RENUMBERED = "renumbered"  # different messages have one number
    OUT_OF_ORDER = "out of order"  # behind a later one of its key
    LATE = "late"  # older than the settle time, and still under way
    BEYOND_MARK = "beyond the mark"  # numbered higher than the lane has ever given out: the lane went back
    NO_NUMBER = "no number"  # a number that no lane gives out: 0, negative, absurdly high
    UNKNOWN_LANE = "unknown lane"  # messages of ours in a lane of which nothing is known
    CLOCK = "clock"  # times that cannot be
    UNKNOWN_TOPIC = "unknown topic"  # rows name a topic that does not exist
    BROKEN_ROW = "broken row"  # no release of the outbox writes it: it cannot be read, or contradicts itself


class Stage(enum.StrEnum):
    """Where a message should be, in the order of its way."""

    BUSINESS = "business"
    OUTBOX = "outbox"
    BROKER = "broker"
    INBOX = "inbox"


STAGE_OF = {"claim": Stage.OUTBOX, "send": Stage.OUTBOX, "store": Stage.BROKER, "handle": Stage.INBOX}  # of each hop


@dataclass(frozen=True, order=True)
class Finding:
    """
    One thing that is wrong, with neighbouring numbers as one.

    Args:
        stage: lost: missing there; otherwise: seen there.
        subject: with stage business, the entry in settings.
        group: with stage inbox, the consumer group.
        first, last: numbers in the lane; None where the messages carry none.
        count: how many messages.
        ids: their ids, as far as they are known; at most as many as were asked for.
        about: business rows concerned.
    """

    kind: Kind
    stage: Stage
    topic: str = ""
    source: str = ""
    lane: int = -1
    group: str = ""
    subject: str = ""
    first: int = -1
    last: int = -1
    count: int = 0
    detail: str = ""
    ids: tuple[str, ...] = field(default=(), compare=False)
    about: tuple[str, ...] = field(default=(), compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the same as JSON knows it; what does not apply is None."""
        found = asdict(self)
        for name in ("lane", "first", "last"):
            if self.first < 0 and self.lane < 0:
                found[name] = None
        return {**found, "ids": list(self.ids), "about": list(self.about), "text": str(self)}

    def __str__(self) -> str:
        """Return it as one line."""
        where = f"{self.stage} of group {self.group!r}" if self.group else f"{self.stage}"
        what = f"{self.subject!r} " if self.subject else ""
        numbers = ""
        if self.lane >= 0:
            span = f"number {self.first}" if self.first == self.last else f"numbers {self.first} to {self.last}"
            numbers = f", lane {self.lane}, {span}"
        topic = f"topic {self.topic!r}" if self.topic else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}: {self.count} x {what}{topic}{numbers}, at {where}{detail}"


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Make one finding of those that are alike but for neighbouring numbers."""
    merged = []
    for _, same in groupby(sorted(findings, key=lambda one: (*_alike(one), one.first)), key=_alike):
        merged += _merge_neighbours(list(same))
    return merged


def _alike(one: Finding) -> tuple[Any, ...]:
    return one.kind, one.stage, one.topic, one.source, one.lane, one.group, one.subject, one.detail


def _merge_neighbours(same: list[Finding]) -> list[Finding]:
    merged: list[Finding] = []
    for one in same:
        before = merged[-1] if merged else None
        if before is not None and one.first >= 0 and before.last + 1 == one.first:
            merged[-1] = replace(before, last=one.last, count=before.count + one.count, ids=before.ids + one.ids)
        else:
            merged.append(one)
    return merged


def clock_has_jumped(tolerance_seconds: float) -> str:
    """Return it as a finding's detail."""
    return f"earlier than what they follow, by more than {tolerance_seconds:g} s: a clock has jumped"


def unknown_topic(topic: str, count: int, ids: Iterable[str]) -> Finding:
    """Return the finding that so many messages name a topic that does not exist. `topic`: as `#7`."""
    detail = NO_SUCH_TOPIC.format(number=topic.lstrip("#"))
    return Finding(Kind.UNKNOWN_TOPIC, Stage.OUTBOX, topic, count=count, detail=detail, ids=tuple(ids))


@dataclass(frozen=True)
class Broken:
    """Rows that no release of the outbox writes, and what is wrong with them. `stage`: a word of `findings.Stage`."""

    stage: str
    topic: str
    detail: str
    count: int
    ids: tuple[str, ...]


def grouped(rows: Iterable[Sequence[Any]], *, names: int = 100) -> list[Broken]:
    """Put rows of stage, topic, what is wrong and message id together; name at most so many ids of each."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for stage, topic, detail, message_id in rows:
        found.setdefault((stage, topic, detail), []).append(str(message_id))
    return [Broken(*what, len(ids), tuple(sorted(ids)[:names])) for what, ids in sorted(found.items())]


def as_finding(one: Broken) -> Finding:
    """Return what rows are in the way as a finding."""
    return Finding(Kind.BROKEN_ROW, Stage(one.stage), one.topic, count=one.count, detail=one.detail, ids=one.ids)

"""
Findings of an audit: their kinds, stages and texts. Nothing here needs Spark, so the admin and tests use it, too.

    lost, broker, orders, lane 1, number 7 }  -- merge -->  lost: 2 x topic 'orders', lane 1, numbers 7 to 8, at broker
    lost, broker, orders, lane 1, number 8 }
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

STRANDED = "no ticket, delayed row or batch refers to it, so no relay would send it"
ROW_GONE = "its message row is missing"
SEVERAL_PLACES = "it is in several places at once"
NO_MESSAGE = "no message was published for it"
NO_ROW = "its business row is missing"
NOT_SENT = "not sent yet"
NO_TOPIC = "#"  # begins the placeholder of a topic whose row is missing: `#7` is the topic with id 7
NO_SUCH_TOPIC = "they refer to topic {number}, whose row in outbox_topic is missing: restore it from a backup"
MAX_IDS_OF_BROKEN_ROWS = 100
NUMBERS_WITHOUT_LANE = "they have numbers, but no lane"
NO_SUCH_LANE = "the outbox has no such lane; its row in outbox_lane is missing, or it belongs to another database"


class FindingKind(enum.StrEnum):
    """The kinds of findings."""

    LOST = "lost"  # missing at this stage
    ORPHAN = "orphan"  # at this stage, but at none before
    DUPLICATED = "duplicated"  # the same message is there more than once
    RENUMBERED = "renumbered"  # different messages have the same number
    OUT_OF_ORDER = "out of order"  # after a message of the same key with a higher number
    LATE = "late"  # older than the settle time, and still in flight
    BEYOND_LAST = "beyond the last number"  # the number is higher than the lane's last one, so the lane was set back
    NO_NUMBER = "no number"  # a number that no lane assigns: 0, negative, absurdly high
    UNKNOWN_LANE = "unknown lane"  # messages of this database in a lane that does not exist
    CLOCK = "clock"  # a time in the future, or before that of the preceding stage
    UNKNOWN_TOPIC = "unknown topic"  # rows refer to a topic that does not exist
    BROKEN_ROW = "broken row"  # unreadable or contradictory; no release of the outbox writes such a row


class Stage(enum.StrEnum):
    """The stages of a message, in the order in which it passes them."""

    BUSINESS = "business"
    OUTBOX = "outbox"
    BROKER = "broker"
    INBOX = "inbox"


# hop of a message, as in `latency.py` -> the stage that it leads to
STAGE_OF = {"claim": Stage.OUTBOX, "send": Stage.OUTBOX, "store": Stage.BROKER, "handle": Stage.INBOX}


@dataclass(frozen=True, order=True)
class Breach:
    """
    A finding of an audit. Messages with consecutive numbers share a finding.

    Args:
        stage: the stage at which the messages are missing (kind LOST), or at which they were found (other kinds).
        group: the consumer group, if the stage is the inbox.
        subject: the name of the entry in settings, if the finding is about business rows.
        first, last: the numbers in the lane; -1 for messages without numbers.
        count: the number of messages, or of business rows.
        detail: a description of the particular fault; the text of the finding shows it in parentheses.
        ids: the ids of the messages, as far as they are known; at most `ids_per_finding`.
        about: the business rows concerned.
    """

    kind: FindingKind
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
        """Return the finding as a dict for JSON; values that do not apply are None."""
        unnumbered = dict.fromkeys(("lane", "first", "last")) if self.first < 0 and self.lane < 0 else {}
        return {**vars(self), **unnumbered, "ids": list(self.ids), "about": list(self.about), "text": str(self)}

    def __str__(self) -> str:
        """Return the finding as one line."""
        location = f"{self.stage} of group {self.group!r}" if self.group else f"{self.stage}"
        subject = f"{self.subject!r} " if self.subject else ""
        numbers = ""
        if self.lane >= 0:
            span = f"number {self.first}" if self.first == self.last else f"numbers {self.first} to {self.last}"
            numbers = f", lane {self.lane}, {span}"
        topic = f"topic {self.topic!r}" if self.topic else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}: {self.count} x {subject}{topic}{numbers}, at {location}{detail}"


def merge(findings: Iterable[Breach]) -> list[Breach]:
    """Merge findings that are equal except for consecutive numbers."""
    merged = []
    for _, same in groupby(sorted(findings, key=MERGE_ORDER), key=MERGE_KEY):
        merged += _merge_neighbours(list(same))
    return merged


MERGE_KEY = attrgetter("kind", "stage", "topic", "source", "lane", "group", "subject", "detail")
MERGE_ORDER = attrgetter("kind", "stage", "topic", "source", "lane", "group", "subject", "detail", "first")
REPORT_ORDER = attrgetter("kind", "stage", "topic", "source", "lane", "group", "subject", "first", "last", "count", "detail")


def _merge_neighbours(same: list[Breach]) -> list[Breach]:
    merged: list[Breach] = []
    for finding in same:
        before = merged[-1] if merged else None
        if before is not None and finding.first >= 0 and before.last + 1 == finding.first:
            merged[-1] = replace(before, last=finding.last, count=before.count + finding.count, ids=before.ids + finding.ids)
        else:
            merged.append(finding)
    return merged


def clock_has_jumped(tolerance_seconds: float) -> str:
    """Return the `detail` of a finding about messages whose time at a stage is before that at the preceding stage."""
    return f"more than {tolerance_seconds:g} s earlier than the preceding stage: a clock has jumped"


def unknown_topic(topic: str, count: int, ids: Iterable[str]) -> Breach:
    """Return a finding about messages of a topic whose row is missing. `topic` is its placeholder, such as `#7`."""
    detail = NO_SUCH_TOPIC.format(number=topic.lstrip("#"))
    return Breach(FindingKind.UNKNOWN_TOPIC, Stage.OUTBOX, topic, count=count, detail=detail, ids=tuple(ids))


def broken_row(stage: str, topic: str, detail: str, count: int, ids: Iterable[str]) -> Breach:
    """Return a finding about rows that no release of the outbox writes."""
    return Breach(FindingKind.BROKEN_ROW, Stage(stage), topic, count=count, detail=detail, ids=tuple(ids))


def broken_rows(rows: Iterable[Sequence[Any]]) -> list[Breach]:
    """Group rows of (stage, topic, what is wrong, message id) into findings."""
    ids: dict[tuple[str, str, str], list[str]] = {}
    for stage, topic, detail, message_id in rows:
        ids.setdefault((stage, topic, detail), []).append(str(message_id))
    return [broken_row(*key, count=len(named), ids=sorted(named)[:MAX_IDS_OF_BROKEN_ROWS]) for key, named in sorted(ids.items())]


@dataclass
class Report:
    """
    The result of an audit.

    Args:
        counts: topic -> name of the count -> number of messages.
        foreign: the number of rows about messages of other databases, which are not audited.
    """

    findings: list[Breach] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    foreign: int = 0

"""The state of the memory broker: half messages, visible copies, and consumer groups."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from datetime import datetime

import msgspec

from outbox.brokers.base import Ended, EndSemantics, HalfRef, Outgoing
from outbox.brokers.memory.faults import Fault
from outbox.message import Resolution


class HalfRecord(msgspec.Struct):
    """A half message. `ended` is None while it is hidden and undecided; `place` counts all half messages from 0."""

    id: str
    place: int
    message: Outgoing
    born_at: datetime
    due_at: datetime  # the next check-back
    ended: Ended | None = None
    asked: int = 0


class Copy(msgspec.Struct, eq=False):
    """A visible copy of a message; a second copy with the same message id is a duplicate."""

    message: Outgoing
    number: int  # its position in the topic, from 0
    stored_at: datetime
    visible_at: datetime


class UnfinishedCopy(msgspec.Struct, eq=False):
    """An unfinished copy of one group. `receipt` is empty before its first delivery; `given_up` is the reason, if it was."""

    copy: Copy
    due_at: datetime
    delivery_count: int = 0
    receipt: str = ""
    given_up: str = ""


class MemoryGroup(msgspec.Struct):
    """A consumer group: its offset in each topic, and its unfinished messages."""

    next_number: dict[str, int] = msgspec.field(default_factory=dict)
    unfinished: dict[str, dict[int, UnfinishedCopy]] = msgspec.field(default_factory=dict)


class Store:
    """The state that brokers of one NAME share. Hold `changed` during each read and each change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.halves: dict[str, HalfRecord] = {}
        self.copies: dict[str, list[Copy]] = {}
        self.groups: dict[str, MemoryGroup] = {}
        self.faults: list[Fault] = []  # those that a test has planned, in order
        self.late: list[Callable[[], object]] = []  # requests in flight
        self.lane_epochs: Counter[tuple[str, int]] = Counter()  # by source and number: how often each was opened
        self.markers: dict[tuple[str, int], str] = {}

    def show(self, message: Outgoing, now: datetime) -> None:
        """Append a copy to its topic, and wake waiting consumers."""
        topic = self.copies.setdefault(message.topic, [])
        topic.append(Copy(message, len(topic), now, max(now, message.deliver_at or now)))
        self.changed.notify_all()

    def half_of(self, ref: HalfRef) -> HalfRecord | None:
        """Return the half message of a reference; None if it never existed, or its place has another one."""
        half = self.halves.get(ref.half_id)
        return half if half and ref.place in ("", str(half.place)) else None

    def end(self, half: HalfRecord, resolution: Resolution, semantics: EndSemantics, now: datetime) -> Ended:
        """Commit or roll back one half message as a broker with these semantics does; return its answer."""
        if half.ended is None or semantics is EndSemantics.STATELESS:
            half.ended = Ended.COMMITTED if resolution is Resolution.COMMIT else Ended.ROLLED_BACK
            if resolution is Resolution.COMMIT:
                self.show(half.message, now)
        return half.ended

    def forget(self, group: str, topics: Collection[str]) -> None:
        """Delete what is stored of a group in these topics."""
        known = self.groups.get(group, MemoryGroup())
        for topic in topics:
            known.next_number.pop(topic, None)
            known.unfinished.pop(topic, None)


_stores: dict[str, Store] = {}
_stores_lock = threading.Lock()


def store(name: str) -> Store:
    """Return the store of that name; without a name, a new one that is not shared."""
    if not name:
        return Store()
    with _stores_lock:
        return _stores.setdefault(name, Store())


def forget(name: str) -> None:
    """Delete the store of that name, so that its next broker starts empty."""
    with _stores_lock:
        _stores.pop(name, None)

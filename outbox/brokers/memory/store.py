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
    """
    A half message.

    Args:
        place: the number of half messages that were stored before it.
        due_at: the time of the next check-back.
        ended: None while it is hidden and undecided.
        asked: the number of check-backs until now.
    """

    id: str
    place: int
    message: Outgoing
    born_at: datetime
    due_at: datetime
    ended: Ended | None = None
    asked: int = 0


class Copy(msgspec.Struct, eq=False):
    """A visible copy of a message; a second copy with the same message id is a duplicate."""

    message: Outgoing
    number: int  # its position in the topic, from 0
    stored_at: datetime
    visible_at: datetime


class UnfinishedCopy(msgspec.Struct, eq=False):
    """
    A copy that a group has read and not acknowledged.

    Args:
        due_at: when it can be delivered the next time.
        receipt: that of the last delivery; "" before the first one, and after the message was given up.
        dead_letter_reason: why the message was given up (`Controls.give_up`); "" if it was not.
    """

    copy: Copy
    due_at: datetime
    delivery_count: int = 0
    receipt: str = ""
    dead_letter_reason: str = ""


class MemoryGroup(msgspec.Struct):
    """
    A consumer group.

    Args:
        next_number: topic -> the number of the next copy to read.
        unfinished: topic -> number of a copy -> its entry.
    """

    next_number: dict[str, int] = msgspec.field(default_factory=dict)
    unfinished: dict[str, dict[int, UnfinishedCopy]] = msgspec.field(default_factory=dict)


class Store:
    """The state that brokers with the same NAME share. Hold `changed` during each read and each change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.halves: dict[str, HalfRecord] = {}
        self.copies: dict[str, list[Copy]] = {}
        self.groups: dict[str, MemoryGroup] = {}
        self.faults: list[Fault] = []  # planned by a test, in order
        self.late: list[Callable[[], object]] = []  # requests in flight
        self.lane_epochs: Counter[tuple[str, int]] = Counter()  # (source, lane) -> how often the lane was opened
        self.markers: dict[tuple[str, int], str] = {}  # (source, lane) -> the marker of the lane's last transaction

    def show(self, message: Outgoing, now: datetime) -> None:
        """Append a copy to its topic, and wake waiting consumers."""
        topic = self.copies.setdefault(message.topic, [])
        topic.append(Copy(message, len(topic), now, max(now, message.deliver_at or now)))
        self.changed.notify_all()

    def half_of(self, ref: HalfRef) -> HalfRecord | None:
        """Return the half message of a reference; None if it never existed, or if the reference names another place."""
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
        """Delete a group's offsets and entries in these topics."""
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

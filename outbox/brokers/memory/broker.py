"""The memory broker. Requests "arrive" at its store at once, unless a test has planned a fault (`controls.py`)."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

from msgspec.structs import replace

from outbox.brokers.base import (
    Backlog,
    Delivery,
    Ended,
    EndSemantics,
    HalfRef,
    HalfStatus,
    Limits,
    Outgoing,
    SendResult,
    SendStatus,
    StoredCopy,
    TopicSpec,
)
from outbox.brokers.capabilities import HasDeadLetterQueue, NeedsCheckLoop, TransactionalSends
from outbox.brokers.memory import lookup, receiver
from outbox.brokers.memory.controls import Controls, check_back_of
from outbox.brokers.memory.faults import Fault, FaultKind, Item, take_fault
from outbox.brokers.memory.options import MemoryOptions
from outbox.brokers.memory.store import HalfRecord, MemoryGroup, store
from outbox.brokers.options import problems_with, read_options
from outbox.brokers.validation import TOO_LATE, known_topic, validate
from outbox.findings import Finding
from outbox.message import Half, Resolution

POLL_SECONDS = 0.02  # `receive` polls, because nothing notifies it when a test moves its clock


def _now() -> datetime:
    return datetime.now(UTC)


R = TypeVar("R")


class MemoryBroker(Controls, NeedsCheckLoop, HasDeadLetterQueue, TransactionalSends):
    """A broker in the memory of the process; brokers with the same OPTIONS["NAME"] share it, across threads."""

    supports_order: ClassVar[bool] = True
    supports_delay: ClassVar[bool] = True
    is_durable: ClassVar[bool] = False

    def __init__(self, alias: str, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> None:
        super().__init__(alias, options, topics)
        self._settings = read_options(MemoryOptions, options)
        self._store = store(self._settings.name)
        self._now: Callable[[], datetime] = self._settings.clock or _now
        self._is_closed = False
        self.end_semantics = self._settings.end
        self.commit_window = self._settings.commit_window if self.end_semantics is EndSemantics.STATELESS else None
        if not self._settings.transactions:
            self.lacks = (*self.lacks, TransactionalSends)
        # Lane -> the source for which this client opened the lane, and the lane's epoch since then (`Store.lane_epochs`).
        self._open_lanes: dict[int, tuple[str, int]] = {}

    @classmethod
    def check_settings(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec] = ()) -> list[Finding]:
        return problems_with(MemoryOptions, options)

    @classmethod
    def limits(cls, options: Mapping[str, Any], topic: TopicSpec) -> Limits:
        """Return the limits. `redelivery` is zero, because `may_deliver_again` names all messages that may be delivered again."""
        return replace(super().limits(options, topic), redelivery=timedelta())

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        with self._store.changed:
            return [self._with_fault("send", message, partial(self._send_one, message)) for message in messages]

    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        with self._store.changed:
            return [self._with_fault("send_halves", message, partial(self._store_half, message)) for message in messages]

    def new_half_id(self, message_id: str) -> str:
        return uuid.uuid4().hex

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        """End half messages with the semantics of the option END."""
        if resolution is Resolution.UNKNOWN:
            raise ValueError("A half message is ended with COMMIT or ROLLBACK, not UNKNOWN.")
        if within is not None and within <= timedelta():
            return [TOO_LATE] * len(halves)
        with self._store.changed:
            return [self._with_fault("end", half, partial(self._end_one, half, resolution)) for half in halves]

    def look_up_halves(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        with self._store.changed:
            planned = [take_fault(self._store.faults, "look_up_halves", half) for half in halves]
            return [
                (fault and fault.status) or lookup.look_up_half(self._store, half, self.end_semantics)
                for half, fault in zip(halves, planned, strict=True)
            ]

    def open_lane(self, source: str, lane: int) -> str | None:
        """Take over a lane. Requests of its last holder that are still in flight will be rejected."""
        with self._store.changed:
            self._store.lane_epochs[source, lane] += 1
            self._open_lanes[lane] = source, self._store.lane_epochs[source, lane]
            return self._store.markers.get((source, lane))

    def is_lane_open(self, lane: int) -> bool:
        return lane in self._open_lanes

    def read_lane_marker(self, source: str, lane: int) -> str | None:
        with self._store.changed:
            return self._store.markers.get((source, lane))

    def send_transaction(self, lane: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        """Make messages visible and set the lane's marker in one step. A planned fault of one message fails all of them."""
        if lane not in self._open_lanes:
            return _unavailable(messages, f"This broker client has not opened lane {lane}. Open it first.")
        source, epoch = self._open_lanes.pop(lane)
        with self._store.changed:
            results = self._send_transaction((source, lane), epoch, messages, marker)
            if self._store.lane_epochs[source, lane] == epoch and all(result.status is SendStatus.ACCEPTED for result in results):
                self._open_lanes[lane] = source, epoch
            return results

    def _send_transaction(self, lane: tuple[str, int], epoch: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        def arrive() -> list[SendResult]:
            if self._store.lane_epochs[lane] != epoch:
                return _unavailable(messages, "Another broker client has taken the lane over. Open it again.")
            rejections = [self._validate(message, is_half=False) for message in messages]
            if any(rejections):
                others = _unavailable(messages, "Another message of its transaction was rejected. This one is sent again.")
                return [rejection or other for rejection, other in zip(rejections, others, strict=True)]
            for message in messages:
                self._store.show(message, self._now())
            self._store.markers[lane] = marker
            return [SendResult(SendStatus.ACCEPTED)] * len(messages)

        for message in messages:
            if (fault := take_fault(self._store.faults, "send_transaction", message)) and fault.result:
                self._apply(fault, arrive)
                return [fault.result] * len(messages)
        return arrive()

    def check_halves(self, ask: Callable[[Half], Resolution], *, limit: int = 100) -> int:
        due = self._take_due_halves(limit)
        for half in due:
            try:
                answer = ask(half)
            except Exception:
                answer = Resolution.UNKNOWN
            if answer is not Resolution.UNKNOWN:
                with self._store.changed:
                    self._store.end(self._store.halves[half.half_id], answer, self.end_semantics, self._now())
        return len(due)

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        deadline = time.monotonic() + wait.total_seconds()
        with self._store.changed:
            while True:
                deliveries = self._take_messages(group, topics, limit, invisible_for)
                remaining = deadline - time.monotonic()
                if deliveries or remaining <= 0 or self._is_closed:
                    return deliveries
                self._store.changed.wait(min(remaining, POLL_SECONDS))

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries longer, with new receipts. Wake waiting consumers, since a time of zero releases the deliveries."""
        with self._store.changed:
            self._store.changed.notify_all()
            return [receiver.renew(self._store, delivery, self._now() + invisible_for) for delivery in deliveries]

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        with self._store.changed:
            return [receiver.finish(self._store, delivery) for delivery in deliveries]

    def receive_dead_letters(self, group: str, topics: Collection[str], *, limit: int) -> list[Delivery]:
        """Receive messages that a test gave up. Each is returned by every call until it is acknowledged."""
        with self._store.changed:
            known_group = self._store.groups.get(group, MemoryGroup())
            return [receiver.deliver(group, entry, self._now()) for entry in receiver.dead_letters(known_group, topics)[:limit]]

    def backlog(self, group: str) -> Backlog:
        with self._store.changed:
            known_group = self._store.groups.get(group, MemoryGroup())
            waiting = {
                topic: receiver.count_waiting(self._store, known_group, topic, self._now()) for topic in known_group.next_number
            }
            return Backlog(
                waiting,
                Counter(entry.copy.message.topic for entry in receiver.dead_letters(known_group, known_group.unfinished)),
            )

    def may_deliver_again(self, group: str, message_ids: Collection[str]) -> set[str]:
        with self._store.changed:
            return receiver.unfinished_ids(self._store, group).intersection(message_ids)

    def forget_group(self, group: str, topics: Collection[str]) -> None:
        with self._store.changed:
            self._store.forget(group, topics)

    def find(self, message_id: str) -> list[StoredCopy]:
        with self._store.changed:
            return lookup.find(self._store, message_id, self._now())

    def close(self) -> None:
        with self._store.changed:
            self._is_closed = True
            self._store.changed.notify_all()

    def _with_fault(self, call: str, message: Item, arrive: Callable[[], SendResult]) -> SendResult:
        """Return the result of a request about a message, which a planned fault may change. `arrive` carries the request out."""
        fault = take_fault(self._store.faults, call, message)
        if fault is None:
            return arrive()
        answer = self._apply(fault, arrive)
        return fault.result or answer or arrive()

    def _apply(self, fault: Fault, arrive: Callable[[], R]) -> R | None:
        """Apply a fault to a request, which arrives now, twice, later or never; return the true answer if there is one."""
        if fault.kind is FaultKind.LATE:
            self._store.late.append(arrive)
        answer = arrive() if fault.kind in (FaultKind.STORED, FaultKind.TWICE) else None
        if fault.kind is FaultKind.TWICE:
            arrive()
        return answer

    def _validate(self, message: Outgoing, *, is_half: bool) -> SendResult | None:
        return validate(message, self.topics, is_half=is_half, max_body_bytes=self.max_body_bytes)

    def _send_one(self, message: Outgoing) -> SendResult:
        if rejection := self._validate(message, is_half=False):
            return rejection
        self._store.show(message, self._now())
        return SendResult(SendStatus.ACCEPTED)

    def _store_half(self, message: Outgoing) -> SendResult:
        if rejection := self._validate(message, is_half=True):
            return rejection
        now = self._now()
        half_id = message.half_id or self.new_half_id(message.message_id)
        known_half = self._store.halves.get(half_id)  # a repeated request keeps its place
        place = known_half.place if known_half else len(self._store.halves)
        self._store.halves[half_id] = HalfRecord(half_id, place, message, now, now + self._settings.check_after)
        return SendResult(SendStatus.ACCEPTED, half_id=half_id, place=str(place))

    def _end_one(self, ref: HalfRef, resolution: Resolution) -> SendResult:
        half = self._store.half_of(ref)
        ended = self._store.end(half, resolution, self.end_semantics, self._now()) if half else Ended.NOT_FOUND
        return SendResult(SendStatus.ACCEPTED, half_id=ref.half_id, ended=ended)

    def _take_due_halves(self, limit: int) -> list[Half]:
        with self._store.changed:
            now = self._now()
            due = [half for half in self._store.halves.values() if half.ended is None and half.due_at <= now]
            due = [half for half in due if half.asked < self._settings.check_limit][:limit]
            for half in due:
                half.asked += 1
                half.due_at = now + self._settings.check_interval
            return [check_back_of(half) for half in due]

    def _take_messages(self, group: str, topics: Collection[str], limit: int, invisible_for: timedelta) -> list[Delivery]:
        known_group = receiver.join(self._store, group, topics, at_end=self._settings.start == "latest")
        deliveries: list[Delivery] = []
        for topic in topics:
            receiver.read_new(self._store, known_group, topic)
            remaining = limit - len(deliveries)
            due = receiver.take_due(
                known_group, group, known_topic(self.topics, topic), now=self._now(), limit=remaining, invisible_for=invisible_for
            )
            deliveries.extend(due)
        return deliveries


def _unavailable(messages: Sequence[Outgoing], reason: str) -> list[SendResult]:
    return [SendResult(SendStatus.UNAVAILABLE, reason=reason)] * len(messages)

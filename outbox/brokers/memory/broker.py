"""The memory broker: the contract."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, TypeVar

from outbox.brokers.base import (
    Broker,
    DeadLetter,
    Delivery,
    Ended,
    HalfRef,
    Outgoing,
    Problem,
    SendResult,
    SendStatus,
    StoredCopy,
    TopicSpec,
)
from outbox.brokers.memory import receiver
from outbox.brokers.memory.controls import Controls, question
from outbox.brokers.memory.ends import end_half
from outbox.brokers.memory.faults import FaultKind
from outbox.brokers.memory.options import MemoryOptions
from outbox.brokers.memory.store import Group, HalfRecord, Place, store
from outbox.brokers.options import problems_with, read_options
from outbox.brokers.validation import known_topic, objection
from outbox.message import Half, Header, Resolution

POLL_SECONDS = 0.02  # a time handed in moves without telling those who wait


def _now() -> datetime:
    return datetime.now(UTC)


H = TypeVar("H", Outgoing, HalfRef)


class MemoryBroker(Controls, Broker):
    """Keeps everything in the memory of the process; brokers with one OPTIONS["NAME"] share it, across threads."""

    supports_half_messages: ClassVar[bool] = True
    supports_order: ClassVar[bool] = True
    supports_delay: ClassVar[bool] = True
    supports_tags: ClassVar[bool] = True
    supports_replay: ClassVar[bool] = True
    needs_check_loop: ClassVar[bool] = True

    def __init__(self, alias: str, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> None:
        super().__init__(alias, options, topics)
        self._settings = read_options(MemoryOptions, options)
        self._store = store(self._settings.name)
        self._now: Callable[[], datetime] = self._settings.clock or _now
        self.end_semantics = self._settings.end

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> list[Problem]:
        """Say which options are unknown or have a wrong value."""
        return problems_with(MemoryOptions, options)

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Show messages to all groups."""
        with self._store.changed:
            return [self._hand_over("send", message, self._send_one) for message in messages]

    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Keep half messages, hidden."""
        with self._store.changed:
            return [self._hand_over("send_halves", message, self._store_half) for message in messages]

    def new_half_id(self, message_id: str) -> str:
        """Make a fresh id."""
        return uuid.uuid4().hex

    def end(self, halves: Sequence[HalfRef], resolution: Resolution) -> list[SendResult]:
        """End half messages in the way `END` says."""
        if resolution is Resolution.UNKNOWN:
            raise ValueError("A half message ends by COMMIT or ROLLBACK.")
        with self._store.changed:
            return [self._hand_over("end", half, lambda ref: self._end_one(ref, resolution)) for half in halves]

    def check_halves(self, ask: Callable[[Half], Resolution], *, limit: int = 100) -> int:
        """Ask about half messages that are due; an exception of `ask` means UNKNOWN."""
        due = self._take_due_halves(limit)
        for half in due:
            try:
                answer = ask(half)
            except Exception:  # whatever went wrong, nothing is known
                answer = Resolution.UNKNOWN
            if answer is not Resolution.UNKNOWN:
                with self._store.changed:
                    end_half(self._store, self._store.halves[half.half_id], answer, self.end_semantics, self._now())
        return len(due)

    def receive(
        self,
        group: str,
        topics: Mapping[str, frozenset[str] | None],
        *,
        limit: int,
        invisible_for: timedelta,
        wait: timedelta,
    ) -> list[Delivery]:
        """Take what is due for a group; wait in real time when nothing is."""
        deadline = time.monotonic() + wait.total_seconds()
        with self._store.changed:
            while True:
                found = self._take(group, topics, limit, invisible_for)
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                self._store.changed.wait(min(left, POLL_SECONDS))

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Finish deliveries that are still held."""
        with self._store.changed:
            return [self._finish(delivery) is not None for delivery in deliveries]

    def retry(self, delivery: Delivery, after: timedelta) -> bool:
        """Let go of a delivery; its message is due again after that time."""
        with self._store.changed:
            place = receiver.held_by(self._store, delivery, self._now())
            if place is not None:
                place.receipt = ""
                place.due_at = self._now() + after
            return place is not None

    def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Put the message aside."""
        with self._store.changed:
            place = self._finish(delivery)
            if place is not None:
                letter = self._letter(delivery, reason)
                self._store.groups[delivery.group].dead[letter.id] = (letter, place.copy)
            return place is not None

    def dead_letters(self, group: str, *, limit: int = 100) -> list[DeadLetter]:
        """List what a group gave up, oldest first."""
        with self._store.changed:
            known = self._store.groups.get(group)
            return [letter for letter, _ in known.dead.values()][:limit] if known else []

    def replay(self, group: str, letters: Sequence[str]) -> int:
        """Have dead letters delivered to their group again."""
        with self._store.changed:
            known = self._store.groups[group]
            copies = [known.dead.pop(letter)[1] for letter in letters if letter in known.dead]
            for copy in copies:
                known.unfinished[copy.message.topic][copy.number] = Place(copy, self._now())
            self._store.changed.notify_all()
            return len(copies)

    def discard(self, group: str, letters: Sequence[str]) -> int:
        """Let dead letters go."""
        with self._store.changed:
            dead = self._store.groups[group].dead
            return len([dead.pop(letter) for letter in letters if letter in dead])

    def backlog(self, group: str) -> dict[str, int]:
        """Count what waits for a group; tags it never asked for are counted until it reads on."""
        with self._store.changed:
            known = self._store.groups.get(group, Group())
            return {topic: receiver.count_waiting(self._store, known, topic, self._now()) for topic in known.next_number}

    def find(self, message_id: str) -> list[StoredCopy]:
        """Look a message up among halves, copies and dead letters."""
        with self._store.changed:
            halves = [half for half in self._store.halves.values() if half.message.message_id == message_id]
            copies = [copy for topic in self._store.copies.values() for copy in topic]
            dead = [copy for group in self._store.groups.values() for _, copy in group.dead.values()]
            found = [
                StoredCopy(message_id, half.message.topic, half.ended or "half", half.id, half.born_at)
                for half in halves
                if half.ended is not Ended.COMMITTED
            ]
            for copy in copies:
                if copy.message.message_id == message_id:
                    state = "dead_letter" if copy in dead else "delayed" if copy.visible_at > self._now() else "visible"
                    found.append(StoredCopy(message_id, copy.message.topic, state, stored_at=copy.stored_at))
            return found

    def _hand_over(self, call: str, message: H, arrive: Callable[[H], SendResult]) -> SendResult:
        fault = self._store.faults.take(call, message)
        if fault is None:
            return arrive(message)
        if fault.fate is FaultKind.LATE:
            self._store.late.append(lambda: arrive(message))
        if fault.fate in (FaultKind.STORED, FaultKind.TWICE):
            answer = arrive(message)
        if fault.fate is FaultKind.TWICE:
            arrive(message)
        return fault.outcome or answer

    def _objection(self, message: Outgoing, *, is_half: bool) -> SendResult | None:
        return objection(message, self.topics, is_half=is_half, max_body_bytes=self.max_body_bytes)

    def _send_one(self, message: Outgoing) -> SendResult:
        if wrong := self._objection(message, is_half=False):
            return wrong
        name = (message.headers.get(Header.SOURCE, ""), message.message_id)
        if not (self._settings.drop_repeats and name in self._store.sent):
            self._store.sent.add(name)
            self._store.show(message, self._now())
        return SendResult(SendStatus.ACCEPTED)

    def _store_half(self, message: Outgoing) -> SendResult:
        if wrong := self._objection(message, is_half=True):
            return wrong
        now = self._now()
        half = HalfRecord(message.half_id or self.new_half_id(message.message_id), message, now, now + self._settings.check_after)
        self._store.halves[half.id] = half
        return SendResult(SendStatus.ACCEPTED, half_id=half.id)

    def _end_one(self, ref: HalfRef, resolution: Resolution) -> SendResult:
        half = self._store.halves.get(ref.half_id)
        ended = end_half(self._store, half, resolution, self.end_semantics, self._now())
        return SendResult(SendStatus.ACCEPTED, half_id=ref.half_id, ended=ended)

    def _take_due_halves(self, limit: int) -> list[Half]:
        with self._store.changed:
            now = self._now()
            due = [half for half in self._store.halves.values() if half.ended is None and half.due_at <= now]
            due = [half for half in due if half.asked < self._settings.check_limit][:limit]
            for half in due:
                half.asked += 1
                half.due_at = now + self._settings.check_interval
            return [question(half) for half in due]

    def _take(self, group: str, topics: receiver.Wanted, limit: int, invisible_for: timedelta) -> list[Delivery]:
        known = receiver.join(self._store, group, topics, at_end=self._settings.start == "latest")
        found: list[Delivery] = []
        for topic, tags in topics.items():
            receiver.read_on(self._store, known, topic, tags)
            left = limit - len(found)
            due = receiver.take(
                known, group, known_topic(self.topics, topic), now=self._now(), limit=left, invisible_for=invisible_for
            )
            found.extend(due)
        return found

    def _finish(self, delivery: Delivery) -> Place | None:
        place = receiver.held_by(self._store, delivery, self._now())
        if place is not None:
            receiver.finish(self._store.groups[delivery.group], place.copy)
        return place

    def _letter(self, delivery: Delivery, reason: str) -> DeadLetter:
        return DeadLetter(
            id=uuid.uuid4().hex,
            group=delivery.group,
            topic=delivery.topic,
            message_id=delivery.message_id,
            reason=reason,
            attempt=delivery.attempt,
            died_at=self._now(),
        )

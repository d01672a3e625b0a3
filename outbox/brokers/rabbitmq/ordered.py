"""
Order by key in one process: of each key only the oldest message is handed out, until it is settled.

RabbitMQ delivers a queue with a single active consumer to one process at a time, in order, and gives what that process held
to the next one in the same order. Which of the messages may be handled side by side is decided here, so a message that is
retried stays with this process. A message that only another process can handle must not: the whole queue is passed on to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import amqp

from outbox.brokers.base import Delivery

WINDOW = 256  # messages that a process fetches of a queue; where all of them wait behind held keys, no other key goes on


@dataclass(frozen=True, slots=True)
class Fetched:
    """
    A message that was delivered over a channel.

    Args:
        received_at: seconds of the receiver's clock.
        queue: where it came from; empty on ordered topics.
        is_standing: over a subscription that stays for as long as a message of the queue is not settled.
    """

    delivery: Delivery
    channel: amqp.Channel
    tag: int
    received_at: float
    queue: str = ""
    is_standing: bool = False


@dataclass(slots=True)
class OrderedMessage:
    """A message of the window. `due_at`: it is not handed out before, in seconds of the receiver's clock."""

    fetched: Fetched
    due_at: float = 0.0
    is_out: bool = False
    times_out: int = 0


@dataclass(slots=True)
class OrderedQueue:
    """
    The window of one queue, oldest message first.

    Args:
        channel: its subscription's own. Closing it returns all messages to the queue, in their order, before another process
            receives any of them.
        opened_at: when it was opened, by `time.monotonic`.
        is_passed_on: nothing more is handed out, and the subscription ends when what is out is settled.
    """

    channel: amqp.Channel
    opened_at: float = field(default_factory=time.monotonic)
    is_passed_on: bool = False
    entries: dict[int, OrderedMessage] = field(default_factory=dict)  # by delivery tag

    def add(self, fetched: Fetched, due_at: float = 0.0) -> None:
        """Put a message behind all others. It is not handed out before that time."""
        self.entries[fetched.tag] = OrderedMessage(fetched, due_at)

    def postponed(self, now: float) -> list[tuple[str, float]]:
        """Return the messages that are to be retried later, by their ids, and when they are due."""
        return [(one.fetched.delivery.message_id, one.due_at) for one in self.entries.values() if one.due_at > now]

    def take(self, limit: int, now: float) -> list[Fetched]:
        """Hand out messages that are due and whose keys are free; each time as a delivery of its own."""
        if self.is_passed_on:
            return []
        due = [one for one in self._heads() if not one.is_out and one.due_at <= now][:limit]
        for entry in due:
            entry.is_out = True
            entry.times_out += 1
        return [_numbered(entry) for entry in due]

    def put_back(self, tag: int, due_at: float) -> None:
        """Hand a message out again, not before that time."""
        entry = self.entries[tag]
        entry.is_out, entry.due_at = False, due_at

    def remove(self, tag: int) -> None:
        """Forget a message that was settled; the next one of its key is free."""
        del self.entries[tag]

    def has_out(self) -> bool:
        """Return whether a message is handed out and not settled."""
        return any(entry.is_out for entry in self.entries.values())

    def fetched_at(self) -> float:
        """Return when the oldest message was fetched."""
        return min((entry.fetched.received_at for entry in self.entries.values()), default=float("inf"))

    def next_due_at(self) -> float | None:
        """Return when the next message can be handed out; None: not before another one is settled."""
        return min((one.due_at for one in self._heads() if not one.is_out), default=None)

    def _heads(self) -> Iterator[OrderedMessage]:
        keys = set()
        for entry in self.entries.values():
            if entry.fetched.delivery.key not in keys:
                keys.add(entry.fetched.delivery.key)
                yield entry


def _numbered(entry: OrderedMessage) -> Fetched:
    """Return a message as it is handed out this time."""
    first = entry.fetched.delivery
    delivery_count, receipt = first.delivery_count + entry.times_out - 1, f"{first.receipt}/{entry.times_out}"
    return replace(entry.fetched, delivery=replace(first, delivery_count=delivery_count, receipt=receipt))

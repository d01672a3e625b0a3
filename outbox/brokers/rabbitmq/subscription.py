"""The messages of one queue that the server has pushed to this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import amqp
import msgspec
from msgspec.structs import replace

from outbox.brokers.base import Delivery


class PushedMessage(msgspec.Struct):
    """
    A message that is not acknowledged.

    Args:
        pushed_at: seconds of the receiver's clock.
        expires_at: until when it is handed out, by the same clock; None: it waits to be handed out.
        waits_since: seconds of `monotonic`.
    """

    delivery: Delivery
    pushed_at: float
    expires_at: float | None = None
    waits_since: float = msgspec.field(default_factory=time.monotonic)
    times_out: int = 0


class Subscription:
    """
    A consumer of a queue over a channel of its own, whose closing gives everything back to the queue.

    Args:
        source: group and topic.
        name: begins the receipts of its deliveries, and is no other subscription's.
        is_ordered: messages of one key wait for each other.
    """

    def __init__(self, channel: amqp.Channel, source: tuple[str, str], queue: str, name: str, *, is_ordered: bool) -> None:
        self.source = source
        self.queue = queue
        self.name = name
        self.is_ordered = is_ordered
        self.is_cancelled = False  # by the server: the queue was deleted
        self.opened_at = time.monotonic()
        self.prefetch = 0
        self.messages: dict[int, PushedMessage] = {}  # by delivery tag, in the order of the queue
        self._channel = channel

    def consume(
        self, prefetch: int, *, note: Callable[[Subscription, amqp.Message], None], note_end: Callable[[Subscription], None]
    ) -> None:
        """
        Consume the queue, with at most `prefetch` messages that are not acknowledged; wait for those that are there.

        Args:
            note: called with each message.
            note_end: called if the queue is deleted.
        """

        def on_cancel(tag: str) -> None:
            self.is_cancelled = True
            note_end(self)

        self._channel.basic_qos(0, prefetch, False)
        self._channel.basic_consume(self.queue, callback=partial(note, self), on_cancel=on_cancel)
        self.prefetch += prefetch
        self._channel.queue_declare(self.queue, passive=True)  # answered after the messages that the queue has sent

    def take(self, limit: int, expires_at: float) -> Iterator[tuple[int, Delivery]]:
        """Hand messages out, the first ones first, each time with another receipt; yield them with their delivery tags."""
        for tag, message in self.ready()[:limit]:
            message.expires_at = expires_at
            message.times_out += 1
            receipt = f"{self.name}/{tag}/{message.times_out}"
            count = message.delivery.delivery_count + message.times_out - 1
            yield tag, replace(message.delivery, receipt=receipt, delivery_count=count)

    def ready(self) -> list[tuple[int, PushedMessage]]:
        """Return messages that can be handed out, with their delivery tags."""
        messages = self.messages.items()
        busy = {message.delivery.key for _, message in messages if self.is_ordered and message.expires_at is not None}
        return [(tag, message) for tag, message in messages if message.expires_at is None and message.delivery.key not in busy]

    def count_out(self) -> int:
        """Return the number of messages that are handed out."""
        return sum(message.expires_at is not None for message in self.messages.values())

    def ack(self, tag: int) -> None:
        """Acknowledge a message."""
        del self.messages[tag]
        self._channel.basic_ack(tag)

    def put_back(self, tag: int) -> None:
        """Hand a message out again, in its place."""
        self.messages[tag].expires_at = None
        self.messages[tag].waits_since = time.monotonic()

    def close(self) -> None:
        """Return all messages to the queue."""
        self._channel.close()  # without `basic.cancel`: the next consumer would get later messages before these are back
        self.messages.clear()

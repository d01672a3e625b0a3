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
    A message that is not acknowledged: it is either handed out, or waits for that.

    Args:
        pushed_at: when it arrived, by the receiver's clock.
        expires_at: when its current delivery expires, by the same clock. None: the message waits to be handed out.
        available_since: when it began to wait to be handed out, by `time.monotonic`.
    """

    delivery: Delivery
    pushed_at: float
    expires_at: float | None = None
    available_since: float = msgspec.field(default_factory=time.monotonic)
    times_handed_out: int = 0


class Subscription:
    """
    The consumers of one queue, over a separate channel. Closing the channel returns all unacknowledged messages to the queue.

    Args:
        group_topic: group and topic.
        name: the unique beginning of the receipts of its deliveries.
        is_ordered: whether a message waits while another one of its key is handed out.
    """

    def __init__(self, channel: amqp.Channel, group_topic: tuple[str, str], queue: str, name: str, *, is_ordered: bool) -> None:
        self.group_topic = group_topic
        self.queue = queue
        self.name = name
        self.is_ordered = is_ordered
        self.is_cancelled = False  # by the server, because the queue was deleted
        self.opened_at = time.monotonic()
        self.prefetch = 0  # the sum for all consumers of the channel
        self.messages: dict[int, PushedMessage] = {}  # delivery tag -> message, in the order of the queue
        self._channel = channel

    def consume(
        self,
        prefetch: int,
        *,
        on_message: Callable[[Subscription, amqp.Message], None],
        on_deleted: Callable[[Subscription], None],
    ) -> None:
        """
        Add a consumer, and wait until messages that are in the queue already have arrived.

        Args:
            prefetch: the maximum number of unacknowledged messages that the server pushes to this consumer.
            on_message: called with each message.
            on_deleted: called if the queue is deleted.
        """

        def on_cancel(tag: str) -> None:
            self.is_cancelled = True
            on_deleted(self)

        self._channel.basic_qos(0, prefetch, False)
        self._channel.basic_consume(self.queue, callback=partial(on_message, self), on_cancel=on_cancel)
        self.prefetch += prefetch
        self._channel.queue_declare(self.queue, passive=True)  # the server answers after it has pushed messages of the queue

    def hand_out(self, limit: int, expires_at: float) -> Iterator[tuple[int, Delivery]]:
        """Hand out available messages in the order of the queue. Yield delivery tags, and deliveries with new receipts."""
        for tag, message in self.available()[:limit]:
            message.expires_at = expires_at
            message.times_handed_out += 1
            receipt = f"{self.name}/{tag}/{message.times_handed_out}"
            count = message.delivery.delivery_count + message.times_handed_out - 1
            yield tag, replace(message.delivery, receipt=receipt, delivery_count=count)

    def available(self) -> list[tuple[int, PushedMessage]]:
        """Return messages that can be handed out, with their delivery tags."""
        messages = self.messages.items()
        busy = {message.delivery.key for _, message in messages if self.is_ordered and message.expires_at is not None}
        return [(tag, message) for tag, message in messages if message.expires_at is None and message.delivery.key not in busy]

    def count_held(self) -> int:
        """Return the number of messages that are handed out."""
        return sum(message.expires_at is not None for message in self.messages.values())

    def ack(self, tag: int) -> None:
        """Acknowledge a message."""
        del self.messages[tag]
        self._channel.basic_ack(tag)

    def put_back(self, tag: int) -> None:
        """Make a message available again, at its position."""
        self.messages[tag].expires_at = None
        self.messages[tag].available_since = time.monotonic()

    def close(self) -> None:
        """Close the channel, which returns all messages to the queue."""
        self._channel.close()  # without `basic.cancel`, after which the next consumer gets later messages before these are back
        self.messages.clear()

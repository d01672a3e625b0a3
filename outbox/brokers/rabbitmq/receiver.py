"""
Receives for consumer groups, and keeps what was received until it is settled.

RabbitMQ knows no time after which a delivery comes again: it belongs to its channel until it is acknowledged or the channel
is gone. So the time is kept here: a delivery that is not renewed in time is returned to its queue, by the thread that sends
the heartbeats if by nobody else. A process that dies or freezes loses its connection, and with it all its deliveries.

Each receive subscribes, and cancels as soon as something has come: what was delivered until then is what it returns. A
subscription that stays would fill this process with messages while a handler runs, and `basic.get` is slow: a quorum queue
answers a few hundred of them in a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import amqp
from amqp import spec

from outbox.brokers.base import Delivery
from outbox.brokers.rabbitmq.connection import LOST, Connection, describe
from outbox.brokers.rabbitmq.envelope import to_delivery
from outbox.brokers.rabbitmq.options import RabbitMQOptions
from outbox.brokers.rabbitmq.topology import queue_name
from outbox.errors import BrokerUnavailable

MOST_AT_ONCE = 65_535  # of a subscription
CONSUMER_MARGIN = 0.9  # of CONSUMER_TIMEOUT: later the server would take back all that came over the channel


@dataclass(slots=True)
class Held:
    """A delivery that is not settled. Times in seconds of the receiver's clock."""

    delivery: Delivery
    tag: int
    received_at: float
    expires_at: float = 0.0


class Receiver:
    """
    Receives over one connection.

    Args:
        declare: declares a group's queues of a topic over a channel.
        clock: gives seconds; it never goes back.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        name: str,
        declare: Callable[[amqp.Channel, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = Connection(options, name, on_beat=self._return_expired)
        self._declare = declare
        self._clock = clock
        self._longest = options.consumer_timeout.total_seconds() * CONSUMER_MARGIN
        self._channel: amqp.Channel | None = None
        self._serial = 0
        self._declared: set[tuple[str, str]] = set()  # group and topic, over the current connection
        self._held: dict[str, Held] = {}  # by receipt
        self._waiting: list[Held] = []  # delivered, and not handed out yet
        self._is_interrupted = False

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages, waiting so long for the first. Raises BrokerUnavailable."""
        if not topics:
            return []
        try:
            tags = self._subscribe(group, topics, limit)
            serial = self._serial
            self.connection.wait(
                wait.total_seconds(), lambda: bool(self._waiting) or self._is_interrupted or serial != self.connection.serial
            )
            self._cancel(tags)
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not deliver: {describe(error)}.") from error
        with self.connection.lock:
            found, self._waiting = _split(self._waiting, group, topics, limit)
            return [self._hand_out(one, invisible_for) for one in found]

    def interrupt(self) -> None:
        """End the wait of `receive`, and of all later ones; from any thread."""
        self._is_interrupted = True
        self.connection.wake()

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Keep deliveries for that time from now; None for one that is gone, or that the server will take back before."""
        found: list[Delivery | None] = []
        with self.connection.lock:
            until = self._clock() + invisible_for.total_seconds()
            for delivery in deliveries:
                held = self._current(delivery)
                if held is not None and until <= held.received_at + self._longest:
                    held.expires_at = until
                    found.append(held.delivery)
                else:
                    found.append(None)
        return found

    def settle(self, deliveries: Iterable[Delivery], *, method: tuple[int, int], last: bool) -> list[bool]:
        """
        Acknowledge deliveries, or return them to their queue. False for one that is gone.

        Args:
            method: `Basic.Ack`, or `Basic.Reject`.
            last: the bit that goes with it: whether all before are meant, or whether the message goes back.

        Raises:
            BrokerUnavailable: the connection was lost; the messages are delivered again.
        """
        found = []
        try:
            with self.connection.lock:
                for delivery in deliveries:
                    held = self._current(delivery)
                    found.append(held is not None)
                    if held is not None:
                        del self._held[delivery.receipt]
                        self._send(held, method, last)
        except LOST as error:
            self.connection.drop()
            raise BrokerUnavailable(f"RabbitMQ did not take the answer: {describe(error)}.") from error
        return found

    def ack(self, deliveries: Iterable[Delivery]) -> list[bool]:
        """Acknowledge deliveries, as `settle`."""
        return self.settle(deliveries, method=spec.Basic.Ack, last=False)

    def give_back(self, deliveries: Iterable[Delivery]) -> list[bool]:
        """Return messages to their queues, as `settle`."""
        return self.settle(deliveries, method=spec.Basic.Reject, last=True)

    def is_held(self, delivery: Delivery) -> bool:
        """Return whether a delivery can still be settled."""
        with self.connection.lock:
            return self._current(delivery) is not None

    def close(self) -> None:
        """Close the connection; what is held goes back to its queues."""
        self._is_interrupted = True
        self.connection.close()

    def _subscribe(self, group: str, topics: Collection[str], limit: int) -> dict[str, str]:
        """Ask for messages, a share of the limit from each topic. Return topics by the tags of their subscriptions."""
        with self.connection.use() as connection:
            channel = self._open_channel(connection)
            self._return_expired()
            for topic in topics:
                self._ensure_declared(channel, group, topic)
            channel.basic_qos(0, min(max(1, limit // len(topics)), MOST_AT_ONCE), False)
            return {
                channel.basic_consume(queue_name(topic, group), callback=partial(self._on_message, group, topic)): topic
                for topic in topics
            }

    def _cancel(self, tags: Iterable[str]) -> None:
        """End subscriptions. What the server had sent until then has come when this returns."""
        with self.connection.use():
            if self._channel is not None and self._serial == self.connection.serial:
                for tag in tags:
                    self._channel.basic_cancel(tag)

    def _on_message(self, group: str, topic: str, message: amqp.Message) -> None:
        self._waiting.append(self._open(group, topic, message))

    def _open(self, group: str, topic: str, message: amqp.Message) -> Held:
        tag = message.delivery_info["delivery_tag"]
        receipt = f"{self._serial}/{tag}"
        return Held(to_delivery(message, group=group, topic=topic, receipt=receipt), tag, self._clock())

    def _hand_out(self, held: Held, invisible_for: timedelta) -> Delivery:
        held.expires_at = self._clock() + invisible_for.total_seconds()
        self._held[held.delivery.receipt] = held
        return held.delivery

    def _current(self, delivery: Delivery) -> Held | None:
        """Return a delivery that is still ours; one whose time is over goes back now."""
        self._return_expired()
        held = self._held.get(delivery.receipt)
        return held if held is not None and delivery.receipt.startswith(f"{self.connection.serial}/") else None

    def _return_expired(self) -> None:
        """Return deliveries to their queues that were not renewed in time."""
        now = self._clock()
        expired = [held for held in self._held.values() if held.expires_at <= now]
        for held in expired:
            del self._held[held.delivery.receipt]
            with suppress(*LOST):  # then they go back with the connection
                self._send(held, spec.Basic.Reject, True)

    def _send(self, held: Held, method: tuple[int, int], last: bool) -> None:
        """Send a settlement; the server answers none."""
        if self._channel is not None and held.delivery.receipt.startswith(f"{self.connection.serial}/"):
            self._channel.send_method(method, "Lb", (held.tag, last))

    def _open_channel(self, connection: amqp.Connection) -> amqp.Channel:
        if self._channel is None or self._serial != self.connection.serial:
            self._held.clear()
            self._waiting.clear()
            self._declared.clear()
            self._channel = connection.channel()
            self._serial = self.connection.serial
        return self._channel

    def _ensure_declared(self, channel: amqp.Channel, group: str, topic: str) -> None:
        if (group, topic) not in self._declared:
            self._declare(channel, group, topic)
            self._declared.add((group, topic))


def _split(waiting: list[Held], group: str, topics: Collection[str], limit: int) -> tuple[list[Held], list[Held]]:
    """Split what came to a wait into what is asked for now and the rest."""
    found, rest = [], []
    for held in waiting:
        is_wanted = held.delivery.group == group and held.delivery.topic in topics and len(found) < limit
        (found if is_wanted else rest).append(held)
    return found, rest

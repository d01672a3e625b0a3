"""
Receives for consumer groups.

On topics without order each receive subscribes, and cancels as soon as something has come: what was delivered until then is
what it returns. A subscription that stays would fill this process with messages while a handler runs, and `basic.get` is
slow: a quorum queue answers a few hundred of them in a second. On ordered topics the subscription stays, since it is what
keeps all other processes from the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from functools import partial

import amqp

from outbox.brokers.base import Delivery
from outbox.brokers.rabbitmq.connection import LOST, Connection, describe
from outbox.brokers.rabbitmq.envelope import to_delivery
from outbox.brokers.rabbitmq.held import CONSUMER_MARGIN, HeldDeliveries
from outbox.brokers.rabbitmq.options import RabbitMQOptions
from outbox.brokers.rabbitmq.ordered import WINDOW, Fetched, OrderedQueue
from outbox.brokers.rabbitmq.topology import MOST_AT_ONCE, queue_name
from outbox.errors import BrokerUnavailable

UNCLAIMED_SECONDS = 1.0  # what came beyond the limit goes back to its queue, unless the next receive takes it before

Source = tuple[str, str]  # group and topic


class Receiver:
    """
    Receives over one connection.

    Args:
        ordered: the topics with order.
        declare: declares a group's queues of a topic over a channel.
        clock: gives seconds; it never goes back.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        name: str,
        ordered: Collection[str],
        declare: Callable[[amqp.Channel, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = Connection(options, name, on_tick=self._return_unclaimed)
        self.held = HeldDeliveries(self._connection, options.consumer_timeout.total_seconds() * CONSUMER_MARGIN, clock)
        self._ordered = ordered
        self._declare = declare
        self._clock = clock
        self._channel: amqp.Channel | None = None
        self._serial = 0
        self._declared: set[Source] = set()  # over the current connection
        self._fetched: list[Fetched] = []  # of topics without order, and not handed out yet
        self._windows: dict[Source, OrderedQueue] = {}
        self._postponed: dict[tuple[Source, str], float] = {}  # message -> when it is due; over lost connections
        self._first = 0  # the topic that is asked first, by turns
        self._is_interrupted = False

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages, waiting so long for the first. Raises BrokerUnavailable."""
        if not topics:
            return []
        try:
            self._refetch_old_windows()
            tags = self._subscribe(group, topics, limit)
            self._wait(group, topics, wait.total_seconds())
            self._cancel(tags)
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not deliver: {describe(error)}.") from error
        with self._connection.lock:
            if self._serial != self._connection.serial:  # lost meanwhile; another process may have the messages
                return []
            fetched, self._fetched = _split(self._fetched, group, topics, limit)
            found = [self.held.hand_out(one, invisible_for) for one in fetched]
            return [*found, *self._take_ordered(group, topics, limit - len(found), invisible_for)]

    def interrupt(self) -> None:
        """End the wait of `receive`, and of all later ones; from any thread."""
        self._is_interrupted = True
        self._connection.wake()

    def close(self) -> None:
        """Close the connection; what is held goes back to its queues."""
        self._is_interrupted = True
        self._connection.close()

    def _refetch_old_windows(self) -> None:
        """Drop the connection if ordered messages have waited for long behind their keys: the server would do so later."""
        with self._connection.lock:
            fetched_at = min((window.fetched_at() for window in self._windows.values()), default=float("inf"))
            if fetched_at + self.held.longest / 2 <= self._clock() and not self.held.has_any:
                self._connection.drop()

    def _subscribe(self, group: str, topics: Collection[str], limit: int) -> list[str]:
        """Ask for messages, for a share of the limit from each topic; return the tags of the subscriptions to cancel."""
        with self._connection.use() as connection:
            channel = self._open_channel(connection)
            self.held.return_expired()
            for topic in topics:
                self._ensure_declared(channel, group, topic)
                if topic in self._ordered and (group, topic) not in self._windows:
                    window = self._windows[group, topic] = OrderedQueue()
                    channel.basic_qos(0, WINDOW, False)
                    channel.basic_consume(queue_name(topic, group), callback=partial(self._on_ordered, group, topic, window))
            plain = [topic for topic in topics if topic not in self._ordered]
            left = limit - len(self._fetched)
            if not plain or left <= 0:
                return []
            self._first += 1  # else the others' messages would always be those that are too many
            at = self._first % len(plain)
            channel.basic_qos(0, min(max(1, left // len(topics)), MOST_AT_ONCE), False)
            return [
                channel.basic_consume(queue_name(topic, group), callback=partial(self._on_message, group, topic))
                for topic in [*plain[at:], *plain[:at]]
            ]

    def _wait(self, group: str, topics: Collection[str], seconds: float) -> None:
        """Wait until a message can be handed out, so long at most."""
        serial, deadline = self._serial, time.monotonic() + seconds
        windows = [self._windows[group, topic] for topic in topics if topic in self._ordered]

        def is_done() -> bool:
            return bool(self._fetched) or self._is_interrupted or serial != self._connection.serial or self._is_due(windows)

        while True:
            left = deadline - time.monotonic()
            with self._connection.lock:
                seconds = min(max(0, left), self._until_due(windows))
            self._connection.wait(seconds, is_done)
            with self._connection.lock:
                if is_done() or left <= 0:
                    return

    def _cancel(self, tags: Iterable[str]) -> None:
        """End subscriptions. What the server had sent until then has come when this returns."""
        with self._connection.use():
            if self._channel is not None and self._serial == self._connection.serial:
                for tag in tags:
                    self._channel.basic_cancel(tag)

    def _take_ordered(self, group: str, topics: Collection[str], limit: int, invisible_for: timedelta) -> list[Delivery]:
        found: list[Delivery] = []
        for topic in topics:
            if (window := self._windows.get((group, topic))) is not None:
                for fetched in window.take(limit - len(found), self._clock()):
                    found.append(self.held.hand_out(fetched, invisible_for, window))
        return found

    def _on_message(self, group: str, topic: str, message: amqp.Message) -> None:
        self._fetched.append(self._open(group, topic, message))

    def _on_ordered(self, group: str, topic: str, window: OrderedQueue, message: amqp.Message) -> None:
        fetched = self._open(group, topic, message)
        window.add(fetched, self._postponed.pop(((group, topic), fetched.delivery.message_id), 0.0))

    def _open(self, group: str, topic: str, message: amqp.Message) -> Fetched:
        tag = message.delivery_info["delivery_tag"]
        delivery = to_delivery(message, group=group, topic=topic, receipt=f"{self._serial}/{tag}")
        return Fetched(delivery, tag, self._clock())

    def _is_due(self, windows: Iterable[OrderedQueue]) -> bool:
        now = self._clock()
        return any((due_at := window.next_due_at()) is not None and due_at <= now for window in windows)

    def _until_due(self, windows: Iterable[OrderedQueue]) -> float:
        """Return how long it takes until a message is due that was to be retried later."""
        now = self._clock()
        return max(0, min((due_at - now for window in windows if (due_at := window.next_due_at()) is not None), default=1e6))

    def _return_unclaimed(self) -> None:
        """Return what nobody has claimed or renewed in time, though nobody calls."""
        if self._serial != self._connection.serial:
            return
        self.held.return_expired()
        now = self._clock()
        unclaimed = [one for one in self._fetched if one.received_at + UNCLAIMED_SECONDS <= now]
        self._fetched = [one for one in self._fetched if one.received_at + UNCLAIMED_SECONDS > now]
        for one in unclaimed:
            self.held.reject(one)

    def _open_channel(self, connection: amqp.Connection) -> amqp.Channel:
        if self._channel is None or self._serial != self._connection.serial:
            self._fetched.clear()
            self._keep_postponed()
            self._windows.clear()
            self._declared.clear()
            self._channel = connection.channel()
            self._serial = self._connection.serial
            self.held.begin(self._channel)
        return self._channel

    def _keep_postponed(self) -> None:
        """Remember what is to be retried later, until it is fetched again, or due."""
        now = self._clock()
        kept = {name: due_at for name, due_at in self._postponed.items() if due_at > now}
        for source, window in self._windows.items():
            kept |= {(source, message_id): due_at for message_id, due_at in window.postponed(now)}
        self._postponed = kept

    def _ensure_declared(self, channel: amqp.Channel, group: str, topic: str) -> None:
        if (group, topic) not in self._declared:
            self._declare(channel, group, topic)
            self._declared.add((group, topic))


def _split(messages: list[Fetched], group: str, topics: Collection[str], limit: int) -> tuple[list[Fetched], list[Fetched]]:
    """Split what has come into what is asked for now and the rest."""
    found: list[Fetched] = []
    rest: list[Fetched] = []
    for fetched in messages:
        is_wanted = fetched.delivery.group == group and fetched.delivery.topic in topics and len(found) < limit
        (found if is_wanted else rest).append(fetched)
    return found, rest

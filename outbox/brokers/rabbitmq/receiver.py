"""
Receives for consumer groups: each queue has a consumer that stays, and to which the server pushes at most a hand of messages.

A message that is released goes back to its place in this process, and is handed out again from there. A message that is not taken
in time goes back to its queue: a delivery that was not renewed, and a message that has waited here for `UNCLAIMED_SECONDS`, since
a handler is slow. Then the channel of the queue is closed, so that another process gets all that it brought. Single messages are
never returned (`basic.reject`), and no consumer is cancelled while its channel stays: the queue would push such a message to this
process again, or behind later ones of its key, and before RabbitMQ 4.3 it keeps what a cancelled consumer holds where its node is
lost.

Topics do not hinder each other: one whose queues the server declares with other arguments, or not at all, is named in `refusals`.
Its queues are read if they exist, so that they can be drained; but not those of another project's group.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta

import amqp
from amqp.exceptions import ChannelError, NotFound

from outbox.brokers.base import Delivery
from outbox.brokers.owners import OwnedByAnother
from outbox.brokers.rabbitmq.client import LOST, RabbitMQConnection, describe
from outbox.brokers.rabbitmq.envelope import given_up, to_delivery
from outbox.brokers.rabbitmq.options import RabbitMQOptions
from outbox.brokers.rabbitmq.subscription import PushedMessage, Subscription
from outbox.brokers.rabbitmq.topology import MOST_AT_ONCE, inlet_name, queue_name, state_of
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger, log_fields
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

UNCLAIMED_SECONDS = 5.0
CHANNEL_SECONDS = 30.0  # maximum age of an idle channel; see `_is_outdated`
# An ordered queue has the same in each process. The server puts messages that a lost process gives back behind those that it got
# back before: a process with a smaller prefetch than the one before it would leave some of these, and change their order.
ORDERED_PREFETCH = 100
DECLARE_SECONDS = 10.0  # a topic is declared again after this time: it may be refused no longer, or have lost its binding
CONSUMER_MARGIN = 0.9  # of CONSUMER_TIMEOUT, after which the server takes back all that came over a channel

Source = tuple[str, str]  # group and topic


class RabbitMQReceiver:
    """
    Receives over one connection.

    Args:
        topics: by name.
        declare: declares a group's queues of a topic over a channel; raises OwnedByAnother.
        clock: gives seconds; it never goes back.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        name: str,
        topics: Mapping[str, TopicSpec],
        declare: Callable[[amqp.Channel, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = RabbitMQConnection(options, name, on_tick=self._give_back)
        self.refusals: dict[str, str] = {}  # topic -> why its queues cannot be declared
        self._topics = topics
        self._declare = declare
        self._clock = clock
        self._longest = options.consumer_timeout.total_seconds() * CONSUMER_MARGIN
        self._serial = 0  # of the connection over which all of these came:
        self._subscriptions: dict[str, Subscription] = {}  # by queue
        self._inlets: list[Subscription] = []  # read without a consumer
        self._out: dict[str, tuple[Subscription, int]] = {}  # receipt -> where its message is, and its delivery tag
        self._declared: dict[Source, float] = {}  # -> when it is declared again, by `monotonic`
        self._refused: dict[Source, float] = {}  # queue that cannot be read -> when it is tried again
        self._names = itertools.count(1)  # of subscriptions
        self._first = 0  # the queue that is read first, by turns
        self._received_at = 0.0  # by `monotonic`
        self._has_ended = False  # a subscription ended since all were opened
        self._is_interrupted = False

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages, waiting for the first at most that long. Raises BrokerUnavailable."""
        deadline = time.monotonic() + wait.total_seconds()
        try:
            subscriptions = self._subscribe(group, topics, limit)
            while not self._wait(subscriptions, deadline - time.monotonic()) and time.monotonic() < deadline:
                subscriptions = self._subscribe(group, topics, limit)
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not deliver: {describe(error)}.") from error
        deliveries: list[Delivery] = []
        with self._connection.lock:
            self._first += 1
            at = self._first % max(1, len(subscriptions))
            expires_at = self._clock() + invisible_for.total_seconds()
            for subscription in (*subscriptions[at:], *subscriptions[:at]):
                deliveries += self._hand_out(subscription, limit - len(deliveries), expires_at)
        return deliveries

    def receive_given_up(self, group: str, topics: Collection[str], limit: int) -> list[Delivery]:
        """Receive messages that the server gave up, unacknowledged ones of an earlier call again."""
        deliveries: list[Delivery] = []
        try:
            with self._connection.use() as connection:
                self._begin(connection)
                for inlet in self._inlets:
                    self._end(inlet)
                self._inlets = []
                for topic in self._topics_given_up(connection, group, topics):
                    if len(deliveries) < limit:
                        deliveries += self._read_inlet(connection, group, topic, limit - len(deliveries))
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not deliver what it gave up: {describe(error)}.") from error
        return deliveries

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries for that time from now. None for one that is gone, or that the server will take back before."""
        until = self._clock() + invisible_for.total_seconds()
        with self._settling():
            renewed: list[Delivery | None] = []
            for delivery in deliveries:
                subscription, tag = self._out.get(delivery.receipt, (None, 0))
                message = subscription.messages[tag] if subscription is not None else None
                is_renewed = message is not None and until <= message.pushed_at + self._longest
                if message is not None and is_renewed:
                    message.expires_at = until
                renewed.append(delivery if is_renewed else None)
            return renewed

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledge deliveries. False for one that is gone."""
        return self._settle(deliveries, Subscription.ack)

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Put messages back into their places."""
        self._settle(deliveries, Subscription.put_back)
        self._connection.wake()

    def forget_declarations(self) -> None:
        """Declare queues again before they are read next."""
        with self._connection.lock:
            self._declared.clear()

    def interrupt(self) -> None:
        """End the wait of `receive`, and of all later ones; from any thread."""
        self._is_interrupted = True
        self._connection.wake()

    def close(self) -> None:
        """Close the connection; held messages go back to their queues."""
        self._is_interrupted = True
        self._connection.close()

    def _settle(self, deliveries: Sequence[Delivery], settle: Callable[[Subscription, int], None]) -> list[bool]:
        with self._settling():
            answers = []
            for delivery in deliveries:
                subscription, tag = self._out.pop(delivery.receipt, (None, 0))
                if subscription is not None:
                    settle(subscription, tag)
                answers.append(subscription is not None)
            return answers

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """
        Hold the lock. `_out` has what can be settled.

        Raises:
            BrokerUnavailable: the connection was lost; all is delivered again.
        """
        try:
            with self._connection.lock:
                self._give_back()
                if self._serial != self._connection.serial:
                    self._out.clear()
                yield
        except LOST as error:
            self._connection.drop()
            raise BrokerUnavailable(f"RabbitMQ did not take the answer: {describe(error)}.") from error

    def _subscribe(self, group: str, topics: Collection[str], limit: int) -> list[Subscription]:
        """Return subscriptions to the queues, each with a share of the limit."""
        with self._connection.use() as connection:
            self._begin(connection)
            self._give_back()
            self._has_ended = False
            readable = [topic for topic in topics if self._is_readable(connection, group, topic)]
            queues = [(topic, queue_name(topic, group)) for topic in readable]
            self._received_at = time.monotonic()
            subscriptions = []
            for topic, queue in queues:
                share = ORDERED_PREFETCH if self._is_ordered(topic) else min(max(1, limit // len(queues)), MOST_AT_ONCE)
                subscriptions.append(self._subscribed(connection, (group, topic), queue, share))
            return [subscription for subscription in subscriptions if subscription is not None]

    def _subscribed(self, connection: amqp.Connection, source: Source, queue: str, share: int) -> Subscription | None:
        """Return the subscription to a queue; None where the server refuses it."""
        subscription = self._subscriptions.get(queue)
        if subscription is not None and _is_outdated(subscription):
            self._end(subscription)
            subscription = None
        if subscription is None:
            name = f"{self._serial}.{next(self._names)}"
            subscription = Subscription(connection.channel(), source, queue, name, is_ordered=self._is_ordered(source[1]))
        elif not _brings_too_few(subscription, share):
            return subscription
        self._subscriptions[queue] = subscription
        try:
            prefetch = share + subscription.count_out() - subscription.prefetch
            subscription.consume(prefetch, note=self._on_message, note_end=self._on_cancel)
        except ChannelError as error:
            if isinstance(error, NotFound):  # it was deleted meanwhile: everything is declared over the next connection
                raise
            self._end(subscription)
            self._refuse(source, f"Queue {queue!r} cannot be read: {describe(error)}.")
            return None
        return subscription

    def _is_ordered(self, topic: str) -> bool:
        return self._topics[topic].type is TopicType.FIFO

    def _begin(self, connection: amqp.Connection) -> None:
        """Forget what came over an earlier connection."""
        if self._serial != self._connection.serial:
            self._subscriptions.clear()
            self._inlets.clear()
            self._out.clear()
            self._declared.clear()
            self._serial = self._connection.serial

    def _wait(self, subscriptions: Sequence[Subscription], seconds: float) -> bool:
        """Wait until a message can be handed out, or `receive` has to end; False: the time is over, or a subscription ended."""
        serial = self._serial

        def is_over() -> bool:
            has_message = any(subscription.ready() for subscription in subscriptions)
            return has_message or self._is_interrupted or serial != self._connection.serial

        self._connection.wait(max(0, seconds), lambda: is_over() or self._has_ended)
        with self._connection.lock:
            return is_over()

    def _hand_out(self, subscription: Subscription, limit: int, expires_at: float) -> list[Delivery]:
        deliveries = []
        if self._serial == self._connection.serial and limit > 0:  # else another process may have the messages
            for tag, delivery in subscription.take(limit, expires_at):
                self._out[delivery.receipt] = subscription, tag
                deliveries.append(delivery)
        return deliveries

    def _give_back(self) -> None:
        """
        End subscriptions with a delivery that has expired, or a message that has waited here for too long.

        No other process gets messages of an ordered topic meanwhile, so these wait as long as this one goes on receiving.
        """
        if self._serial != self._connection.serial:
            return
        now, oldest = self._clock(), time.monotonic() - UNCLAIMED_SECONDS
        for subscription in list(self._subscriptions.values()):
            is_patient = subscription.is_ordered and self._received_at > oldest
            if any(
                message.waits_since <= oldest and not is_patient if message.expires_at is None else message.expires_at <= now
                for message in subscription.messages.values()
            ):
                self._end(subscription)

    def _end(self, subscription: Subscription) -> None:
        """Return all messages of a subscription to its queue."""
        self._subscriptions.pop(subscription.queue, None)
        self._out = {receipt: place for receipt, place in self._out.items() if place[0] is not subscription}
        self._has_ended = True
        with self._connection.use():
            subscription.close()

    def _on_message(self, subscription: Subscription, message: amqp.Message) -> None:
        group, topic = subscription.source
        delivery = to_delivery(message, group=group, topic=topic)
        subscription.messages[message.delivery_info["delivery_tag"]] = PushedMessage(delivery, self._clock())

    def _on_cancel(self, subscription: Subscription) -> None:
        """Declare and read a queue anew that was deleted."""
        self._declared.pop(subscription.source, None)
        self._has_ended = True

    def _topics_given_up(self, connection: amqp.Connection, group: str, topics: Collection[str]) -> list[str]:
        """Return the topics with messages in the group's inlet; one that is missing is declared again next time."""
        readable = [topic for topic in topics if self._is_readable(connection, group, topic)]
        with closing(connection.channel()) as channel:
            states = {topic: state_of(channel, inlet_name(topic, group)) for topic in readable}
        for topic in (topic for topic, state in states.items() if state is None):
            if topic not in self.refusals:
                del self._declared[group, topic]
        return [topic for topic, state in states.items() if state is not None and state[0] > 0]

    def _read_inlet(self, connection: amqp.Connection, group: str, topic: str, limit: int) -> list[Delivery]:
        queue, channel = inlet_name(topic, group), connection.channel()
        inlet = Subscription(channel, (group, topic), queue, f"{self._serial}.{next(self._names)}", is_ordered=False)
        self._inlets.append(inlet)
        for _ in range(limit):
            message = channel.basic_get(queue)
            if message is None:
                break
            delivery = given_up(message, group=group, topic=topic, queue=queue_name(topic, group))
            inlet.messages[message.delivery_info["delivery_tag"]] = PushedMessage(delivery, self._clock())
        return self._hand_out(inlet, limit, float("inf"))

    def _is_readable(self, connection: amqp.Connection, group: str, topic: str) -> bool:
        """Declare a group's queues of a topic, if that was not done; return whether there is a queue to read."""
        source = (group, topic)
        if time.monotonic() < self._refused.get(source, float("-inf")):
            return False
        if time.monotonic() < self._declared.get(source, float("-inf")):
            return True
        with closing(connection.channel()) as channel:  # the server closes it where it refuses
            try:
                self._declare(channel, group, topic)
            except OwnedByAnother as error:
                self._refuse(source, str(error))
                return False
            except ChannelError as error:
                self._refuse(source, f"Its queues for group {group!r} cannot be declared: {describe(error)}.")
                if not _exists(channel, queue_name(topic, group)):
                    return False
                del self._refused[source]  # there is something to read
            else:
                self.refusals.pop(topic, None)
            self._declared[source] = time.monotonic() + DECLARE_SECONDS
        return True

    def _refuse(self, source: Source, reason: str) -> None:
        group, topic = source
        text = "Group %r cannot receive from topic %r as configured: %s"
        logger.error(text, group, topic, reason, extra=log_fields(group=group, topic=topic))
        self.refusals[topic] = reason
        self._refused[source] = time.monotonic() + DECLARE_SECONDS


def _is_outdated(subscription: Subscription) -> bool:
    """
    Return whether a subscription has to be replaced: its queue was deleted, or it has been idle for a while.

    When a node of a cluster is lost, so may be a delivery on its way. The queue holds it for the channel as long as that is open,
    and sends it again only with the next one for the same consumer.
    """
    is_old = time.monotonic() >= subscription.opened_at + CHANNEL_SECONDS
    return subscription.is_cancelled or (is_old and not subscription.messages)


def _brings_too_few(subscription: Subscription, share: int) -> bool:
    """
    Return whether another consumer is needed beside the one that there is; not for a few more messages than it brings.

    The queue of an ordered topic has one active consumer.
    """
    return not subscription.is_ordered and share + 2 * subscription.count_out() >= 2 * subscription.prefetch


def _exists(channel: amqp.Channel, queue: str) -> bool:
    try:
        channel.queue_declare(queue, passive=True)
    except ChannelError:
        return False
    return True

"""
Receives for consumer groups. Each queue has a long-lived consumer, to which the server pushes a limited number of messages.

A released message stays in this process, at its position, and is handed out again from there. A message goes back to its queue if
its delivery was not renewed in time, or if it has waited here for `UNCLAIMED_SECONDS`, because a handler is slow. To return it,
the channel of the queue is closed, which also returns all other messages of the queue that this process has not acknowledged, so
that another process can receive them. Single messages are never returned (`basic.reject`), because the queue would push such a
message to this process again, or after later ones of its key. No consumer is cancelled while its channel stays open, because that
may also change the order of messages; besides, before RabbitMQ 4.3, a queue whose node is lost would keep the messages of a
cancelled consumer for that consumer.

Topics do not affect each other. `refusals` names a topic whose queues exist with other arguments, or cannot be declared. Its
queues are still read if they exist, so that they can be drained, unless the group belongs to another project.
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
from outbox.brokers.rabbitmq.envelope import dead_letter, to_delivery
from outbox.brokers.rabbitmq.options import RabbitMQOptions
from outbox.brokers.rabbitmq.subscription import PushedMessage, Subscription
from outbox.brokers.rabbitmq.topology import MAX_PREFETCH, dead_letter_queue_name, queue_name, state_of
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger, log_fields
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

UNCLAIMED_SECONDS = 5.0  # messages that wait here for longer go back to their queue
CHANNEL_SECONDS = 30.0  # maximum age of an idle channel; see `_is_outdated`
# The prefetch of an ordered queue is the same in all processes, because the server puts the messages that a lost process returns
# after those that were returned before. A process with a smaller prefetch than its predecessor would leave some of these earlier
# messages in the queue, so that messages which it returns would come after them, although they belong before them.
ORDERED_PREFETCH = 100
DECLARE_SECONDS = 10.0  # queues are declared again at this interval, since a refusal may be over, or a binding lost
# The part of CONSUMER_TIMEOUT for which a delivery may be held. After the full time, the server closes the delivery's channel,
# and takes back all messages of that channel.
CONSUMER_MARGIN = 0.9

GroupTopic = tuple[str, str]


class RabbitMQReceiver:
    """
    Receives over one connection.

    Args:
        topics: name -> topic.
        declare: declares a group's queues of a topic over a channel; raises OwnedByAnother.
        clock: returns seconds and never goes back; deliveries expire by it.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        name: str,
        topics: Mapping[str, TopicSpec],
        declare: Callable[[amqp.Channel, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = RabbitMQConnection(options, name, on_tick=self._return_overdue)
        self.refusals: dict[str, str] = {}  # topic -> why its queues cannot be declared
        self._topics = topics
        self._declare = declare
        self._clock = clock
        self._max_hold_seconds = options.consumer_timeout.total_seconds() * CONSUMER_MARGIN
        self._serial = 0  # the connection to which the following state belongs (`RabbitMQConnection.serial`)
        self._subscriptions: dict[str, Subscription] = {}  # queue -> its subscription
        self._dead_letter_queues: list[Subscription] = []  # these are read without a consumer
        self._held: dict[str, tuple[Subscription, int]] = {}  # receipt -> the subscription and delivery tag of its message
        # When declared queues are declared again, and when refused ones are tried again; both by `monotonic`.
        self._declare_again_at: dict[GroupTopic, float] = {}
        self._try_again_at: dict[GroupTopic, float] = {}
        self._subscription_numbers = itertools.count(1)
        self._rotation = 0  # counts receives, so that the queues take turns in being read first
        self._received_at = 0.0  # when the last receive looked for messages, by `monotonic`
        self._has_subscription_ended = False  # since the last receive began
        self._is_interrupted = False

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages, and wait up to `wait` for the first one. Raises BrokerUnavailable."""
        deadline = time.monotonic() + wait.total_seconds()
        try:
            subscriptions = self._subscribe(group, topics, limit)
            while not self._wait(subscriptions, deadline - time.monotonic()) and time.monotonic() < deadline:
                subscriptions = self._subscribe(group, topics, limit)
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not deliver: {describe(error)}.") from error
        deliveries: list[Delivery] = []
        with self._connection.lock:
            self._rotation += 1
            start = self._rotation % max(1, len(subscriptions))
            expires_at = self._clock() + invisible_for.total_seconds()
            for subscription in (*subscriptions[start:], *subscriptions[:start]):
                deliveries += self._hand_out(subscription, limit - len(deliveries), expires_at)
        return deliveries

    def receive_dead_letters(self, group: str, topics: Collection[str], limit: int) -> list[Delivery]:
        """Receive messages from the group's dead-letter queues, even those that an earlier call returned, if not acknowledged."""
        deliveries: list[Delivery] = []
        try:
            with self._connection.use() as connection:
                self._reset_after_reconnect(connection)
                for subscription in self._dead_letter_queues:
                    self._close_subscription(subscription)
                self._dead_letter_queues = []
                for topic in self._topics_with_dead_letters(connection, group, topics):
                    if len(deliveries) < limit:
                        deliveries += self._read_dead_letters(connection, group, topic, limit - len(deliveries))
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not deliver messages from a dead-letter queue: {describe(error)}.") from error
        return deliveries

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries for that time from now. None for one that is no longer held, or that the server takes back sooner."""
        until = self._clock() + invisible_for.total_seconds()
        with self._settling():
            renewed: list[Delivery | None] = []
            for delivery in deliveries:
                subscription, tag = self._held.get(delivery.receipt, (None, 0))
                message = subscription.messages[tag] if subscription is not None else None
                is_renewed = message is not None and until <= message.pushed_at + self._max_hold_seconds
                if message is not None and is_renewed:
                    message.expires_at = until
                renewed.append(delivery if is_renewed else None)
            return renewed

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledge deliveries. False for one that is no longer held."""
        return self._settle(deliveries, Subscription.ack)

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Make messages available again, each at its position."""
        self._settle(deliveries, Subscription.put_back)
        self._connection.wake()

    def forget_declarations(self) -> None:
        """Declare all queues again before they are read the next time."""
        with self._connection.lock:
            self._declare_again_at.clear()

    def interrupt(self) -> None:
        """End the wait of the current `receive` and of all later ones. Any thread may call this."""
        self._is_interrupted = True
        self._connection.wake()

    def close(self) -> None:
        """Close the connection; held messages go back to their queues."""
        self._is_interrupted = True
        self._connection.close()

    def _settle(self, deliveries: Sequence[Delivery], settle: Callable[[Subscription, int], None]) -> list[bool]:
        """Call `settle` with the subscription and delivery tag of each delivery that is still held. Return whether each was."""
        with self._settling():
            answers = []
            for delivery in deliveries:
                subscription, tag = self._held.pop(delivery.receipt, (None, 0))
                if subscription is not None:
                    settle(subscription, tag)
                answers.append(subscription is not None)
            return answers

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """
        Hold the lock, after dropping deliveries from `_held` that can no longer be settled.

        Raises:
            BrokerUnavailable: the connection was lost, so that all messages are delivered again.
        """
        try:
            with self._connection.lock:
                self._return_overdue()
                if self._serial != self._connection.serial:
                    self._held.clear()
                yield
        except LOST as error:
            self._connection.drop()
            raise BrokerUnavailable(f"RabbitMQ did not take the acknowledgements: {describe(error)}.") from error

    def _subscribe(self, group: str, topics: Collection[str], limit: int) -> list[Subscription]:
        """Return subscriptions to the queues, each with a share of the limit."""
        with self._connection.use() as connection:
            self._reset_after_reconnect(connection)
            self._return_overdue()
            self._has_subscription_ended = False
            readable = [topic for topic in topics if self._is_readable(connection, group, topic)]
            queues = [(topic, queue_name(topic, group)) for topic in readable]
            self._received_at = time.monotonic()
            subscriptions = []
            for topic, queue in queues:
                share = ORDERED_PREFETCH if self._is_ordered(topic) else min(max(1, limit // len(queues)), MAX_PREFETCH)
                subscriptions.append(self._subscription_to(connection, (group, topic), queue, share))
            return [subscription for subscription in subscriptions if subscription is not None]

    def _subscription_to(
        self, connection: amqp.Connection, group_topic: GroupTopic, queue: str, share: int
    ) -> Subscription | None:
        """Return the subscription to a queue, which may be new; None if the server refuses it."""
        subscription = self._subscriptions.get(queue)
        if subscription is not None and _is_outdated(subscription):
            self._close_subscription(subscription)
            subscription = None
        if subscription is None:
            name = f"{self._serial}.{next(self._subscription_numbers)}"
            subscription = Subscription(
                connection.channel(), group_topic, queue, name, is_ordered=self._is_ordered(group_topic[1])
            )
        elif not _needs_another_consumer(subscription, share):
            return subscription
        self._subscriptions[queue] = subscription
        try:
            prefetch = share + subscription.count_held() - subscription.prefetch
            subscription.consume(prefetch, on_message=self._on_message, on_deleted=self._on_cancel)
        except ChannelError as error:
            if isinstance(error, NotFound):  # it was deleted meanwhile; the connection is dropped, and the next one declares it
                raise
            self._close_subscription(subscription)
            self._refuse(group_topic, f"Queue {queue!r} cannot be read: {describe(error)}.")
            return None
        return subscription

    def _is_ordered(self, topic: str) -> bool:
        return self._topics[topic].type is TopicType.FIFO

    def _reset_after_reconnect(self, connection: amqp.Connection) -> None:
        """Drop all state that belongs to an earlier connection."""
        if self._serial != self._connection.serial:
            self._subscriptions.clear()
            self._dead_letter_queues.clear()
            self._held.clear()
            self._declare_again_at.clear()
            self._serial = self._connection.serial

    def _wait(self, subscriptions: Sequence[Subscription], seconds: float) -> bool:
        """
        Wait until a message is available. Return whether `receive` has to return.

        True also if it was interrupted or the connection was lost. False if the time is over, or a subscription has ended.
        """
        serial = self._serial

        def is_over() -> bool:
            has_message = any(subscription.available() for subscription in subscriptions)
            return has_message or self._is_interrupted or serial != self._connection.serial

        self._connection.wait(max(0, seconds), lambda: is_over() or self._has_subscription_ended)
        with self._connection.lock:
            return is_over()

    def _hand_out(self, subscription: Subscription, limit: int, expires_at: float) -> list[Delivery]:
        deliveries = []
        if self._serial == self._connection.serial and limit > 0:  # over another connection, the messages may be redelivered
            for tag, delivery in subscription.hand_out(limit, expires_at):
                self._held[delivery.receipt] = subscription, tag
                deliveries.append(delivery)
        return deliveries

    def _return_overdue(self) -> None:
        """
        Close subscriptions with an expired delivery, or with a message that has waited here for UNCLAIMED_SECONDS.

        Messages of an ordered topic may wait longer while this process keeps receiving. Its queue has one active consumer, so
        that no other process can receive later ones meanwhile.
        """
        if self._serial != self._connection.serial:
            return
        now, oldest = self._clock(), time.monotonic() - UNCLAIMED_SECONDS
        for subscription in list(self._subscriptions.values()):
            may_wait = subscription.is_ordered and self._received_at > oldest
            if any(
                message.available_since <= oldest and not may_wait if message.expires_at is None else message.expires_at <= now
                for message in subscription.messages.values()
            ):
                self._close_subscription(subscription)

    def _close_subscription(self, subscription: Subscription) -> None:
        """Close a subscription, which returns all its messages to the queue."""
        self._subscriptions.pop(subscription.queue, None)
        self._held = {receipt: holder for receipt, holder in self._held.items() if holder[0] is not subscription}
        self._has_subscription_ended = True
        with self._connection.use():
            subscription.close()

    def _on_message(self, subscription: Subscription, message: amqp.Message) -> None:
        group, topic = subscription.group_topic
        delivery = to_delivery(message, group=group, topic=topic)
        subscription.messages[message.delivery_info["delivery_tag"]] = PushedMessage(delivery, self._clock())

    def _on_cancel(self, subscription: Subscription) -> None:
        """End the wait of a receive, so that it declares the deleted queue, and subscribes to it, again."""
        self._declare_again_at.pop(subscription.group_topic, None)
        self._has_subscription_ended = True

    def _topics_with_dead_letters(self, connection: amqp.Connection, group: str, topics: Collection[str]) -> list[str]:
        """Return the topics with messages in the group's dead-letter queue. The next call declares queues that are missing."""
        readable = [topic for topic in topics if self._is_readable(connection, group, topic)]
        with closing(connection.channel()) as channel:
            states = {topic: state_of(channel, dead_letter_queue_name(topic, group)) for topic in readable}
        for topic in (topic for topic, state in states.items() if state is None):
            if topic not in self.refusals:
                del self._declare_again_at[group, topic]
        return [topic for topic, state in states.items() if state is not None and state[0] > 0]

    def _read_dead_letters(self, connection: amqp.Connection, group: str, topic: str, limit: int) -> list[Delivery]:
        queue, channel = dead_letter_queue_name(topic, group), connection.channel()
        subscription = Subscription(
            channel, (group, topic), queue, f"{self._serial}.{next(self._subscription_numbers)}", is_ordered=False
        )
        self._dead_letter_queues.append(subscription)
        for _ in range(limit):
            message = channel.basic_get(queue)
            if message is None:
                break
            delivery = dead_letter(message, group=group, topic=topic, queue=queue_name(topic, group))
            subscription.messages[message.delivery_info["delivery_tag"]] = PushedMessage(delivery, self._clock())
        return self._hand_out(subscription, limit, float("inf"))

    def _is_readable(self, connection: amqp.Connection, group: str, topic: str) -> bool:
        """Declare a group's queues of a topic if that is due. Return whether the group's queue can be read."""
        group_topic = (group, topic)
        if time.monotonic() < self._try_again_at.get(group_topic, float("-inf")):
            return False
        if time.monotonic() < self._declare_again_at.get(group_topic, float("-inf")):
            return True
        with closing(connection.channel()) as channel:  # the server closes the channel if it refuses a declaration
            try:
                self._declare(channel, group, topic)
            except OwnedByAnother as error:
                self._refuse(group_topic, str(error))
                return False
            except ChannelError as error:
                self._refuse(group_topic, f"Its queues for group {group!r} cannot be declared: {describe(error)}.")
                if not _exists(channel, queue_name(topic, group)):
                    return False
                del self._try_again_at[group_topic]  # the queue exists, so it can be read
            else:
                self.refusals.pop(topic, None)
            self._declare_again_at[group_topic] = time.monotonic() + DECLARE_SECONDS
        return True

    def _refuse(self, group_topic: GroupTopic, reason: str) -> None:
        """Record and log why a group cannot receive from a topic."""
        group, topic = group_topic
        text = "Group %r cannot receive from topic %r as configured: %s"
        logger.error(text, group, topic, reason, extra=log_fields(group=group, topic=topic))
        self.refusals[topic] = reason
        self._try_again_at[group_topic] = time.monotonic() + DECLARE_SECONDS


def _is_outdated(subscription: Subscription) -> bool:
    """
    Return whether a subscription has to be replaced, because its queue was deleted, or because it is old and holds no messages.

    A delivery in transit may be lost along with a node of the cluster. The queue keeps it for the channel as long as the channel
    is open, and sends it again only with the next delivery for the same consumer.
    """
    is_old = time.monotonic() >= subscription.opened_at + CHANNEL_SECONDS
    return subscription.is_cancelled or (is_old and not subscription.messages)


def _needs_another_consumer(subscription: Subscription, share: int) -> bool:
    """
    Return whether a subscription needs a further consumer, because messages that are handed out use up its prefetch.

    A small shortage is accepted. The queue of an ordered topic never has more than one active consumer.
    """
    return not subscription.is_ordered and share + 2 * subscription.count_held() >= 2 * subscription.prefetch


def _exists(channel: amqp.Channel, queue: str) -> bool:
    try:
        channel.queue_declare(queue, passive=True)
    except ChannelError:
        return False
    return True

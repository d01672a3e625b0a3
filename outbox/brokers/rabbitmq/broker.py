"""The RabbitMQ broker: the contract, each call handed to its module."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import amqp
from amqp.exceptions import ChannelError, NotFound

from outbox.brokers.base import DeadLetter, Delivery, Outgoing, Problem, SendResult, SendStatus, TopicSpec
from outbox.brokers.capabilities import DeadLetters
from outbox.brokers.options import read_options
from outbox.brokers.rabbitmq import topology
from outbox.brokers.rabbitmq.connection import LOST, Connection, describe
from outbox.brokers.rabbitmq.dead_letters import DeadLetterQueues
from outbox.brokers.rabbitmq.envelope import DIED_AT, REASON, copy_of, micros_of, to_amqp, too_large_for_amqp
from outbox.brokers.rabbitmq.held import CONSUMER_MARGIN
from outbox.brokers.rabbitmq.options import RabbitMQOptions, problems
from outbox.brokers.rabbitmq.receiver import Receiver
from outbox.brokers.rabbitmq.sender import Publication, Publisher
from outbox.brokers.rabbitmq.server_checks import ServerChecks
from outbox.brokers.validation import known_topic, validate
from outbox.errors import BrokerUnavailable
from outbox.message import TopicType


class RabbitMQBroker(DeadLetters):
    """
    Carries one-phase messages over RabbitMQ 3.10 and later; docs/brokers/rabbitmq.md says what it promises.

    Messages are published over one connection and received over another: while RabbitMQ is short of memory or disk it blocks
    connections that publish, and acknowledgments have to get through. A third one, for questions, is opened when it is needed.

    Args:
        clock: returns seconds and never goes back; deliveries expire by it.
    """

    system: ClassVar[str] = "rabbitmq"
    supports_order: ClassVar[bool] = True
    supports_delay: ClassVar[bool] = True
    max_delay = topology.MAX_DELAY

    def __init__(
        self,
        alias: str,
        options: Mapping[str, Any],
        topics: Sequence[TopicSpec],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(alias, options, topics)
        self._settings = read_options(RabbitMQOptions, options)
        self._publishing = Connection(self._settings, f"outbox {alias} publishing")
        self._questions = Connection(self._settings, f"outbox {alias} questions")
        self._publisher = Publisher(self._publishing, self._settings.request_timeout.total_seconds())
        self._ordered = {topic.name for topic in topics if topic.type is TopicType.FIFO}
        self._receiver = Receiver(self._settings, f"outbox {alias} receiving", self._ordered, self._declare_group, clock)
        self._held = self._receiver.held
        self._letters = DeadLetterQueues(self._questions, list(self.topics), self._publish_all)
        self._has_ladder = False
        self._declared: dict[str, int] = {}  # topic -> serial of the connection over which it was declared

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> list[Problem]:
        """Return what is wrong with the OPTIONS, without a connection."""
        return problems(options)

    @classmethod
    def check_topics(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> list[Problem]:
        """Return topics that cannot be served, and groups of topics that are not there."""
        names = {topic.name for topic in topics}
        found = [
            Problem(f'OPTIONS["GROUPS"] names topic {name!r}, which this broker does not have.', "Correct it, or add the topic.")
            for name in read_options(RabbitMQOptions, options).groups
            if name not in names
        ]
        for topic in topics:
            if topic.retention > topology.MAX_RETENTION:
                text = (
                    f'OUTBOX["TOPICS"]["{topic.name}"]["RETENTION"] is {topic.retention}, and RabbitMQ declares no queue with it.'
                )
                found.append(Problem(text, f"Set it to {topology.MAX_RETENTION.days} days or less."))
        return found

    @classmethod
    def max_send_duration(cls, options: Mapping[str, Any]) -> timedelta:
        """Return how long a send of one batch may take: to connect to any node, to declare, and to wait for the confirms."""
        settings = read_options(RabbitMQOptions, options)
        return (len(settings.nodes) + 2) * settings.request_timeout

    @classmethod
    def max_handling_time(cls, options: Mapping[str, Any], kind: TopicType) -> timedelta | None:
        """Return how long a delivery is renewed before the server would take it back; ordered ones may have waited before."""
        longest = read_options(RabbitMQOptions, options).consumer_timeout * CONSUMER_MARGIN
        return longest / 2 if kind is TopicType.FIFO else longest

    def check(self) -> list[Problem]:
        """Return what is wrong with the options, the nodes, what is declared there, and the permissions; see `server_checks`."""
        if found := [*self.check_options(self.options), *self.check_topics(self.options, list(self.topics.values()))]:
            return found
        return ServerChecks(self._settings, self._questions, self.topics.values(), self._declare_queues).problems()

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send messages and wait for the confirms of all."""
        results = [self._reject(message) for message in messages]
        good = [index for index, result in enumerate(results) if result is None]
        if good:
            if failed := self._declare_topics({messages[index].topic for index in good}):
                for index in good:
                    results[index] = failed.get(messages[index].topic)
                good = [index for index in good if results[index] is None]
            sent = self._publisher.publish([self._publication(messages[index]) for index in good])
            for index, result in zip(good, sent, strict=True):
                results[index] = result
        return [result for result in results if result is not None]

    def receive(
        self,
        group: str,
        topics: Collection[str],
        *,
        limit: int,
        invisible_for: timedelta,
        wait: timedelta,
    ) -> list[Delivery]:
        """Receive messages for a group; its queues are declared if they are not there."""
        for topic in topics:
            known_topic(self.topics, topic)
        return self._receiver.receive(group, topics, limit=limit, invisible_for=invisible_for, wait=wait)

    def interrupt(self) -> None:
        """End the wait of `receive`, and of all later ones."""
        self._receiver.interrupt()

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Keep deliveries, up to most of CONSUMER_TIMEOUT after they came."""
        return self._held.renew(deliveries, invisible_for)

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Return messages to their queues."""
        self._held.give_back(deliveries)

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledge deliveries; RabbitMQ answers none, so one whose connection breaks now comes again."""
        return self._held.ack(deliveries)

    def retry(self, delivery: Delivery, after: timedelta) -> bool:
        """
        Put a copy into the ladder, which brings it back to the group's queue, and acknowledge the delivery.

        A message of an ordered topic stays with this process, before the others of its key; if the process dies, it is retried
        at once.
        """
        if delivery.topic in self._ordered:
            return self._held.postpone(delivery, after)
        if after <= timedelta():
            return self._held.give_back([delivery])[0]
        message = copy_of(delivery, attempts=delivery.attempt, **{topology.DESTINATION: _queue_of(delivery)})
        return self._replace(delivery, self._delayed(message, after, delivery.tag))

    def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Put a copy into the group's dead letters, and acknowledge the delivery."""
        died_at = micros_of(datetime.now(UTC))
        message = copy_of(delivery, attempts=delivery.attempt, **{REASON: reason, DIED_AT: died_at})
        return self._replace(delivery, Publication("", topology.dead_queue_name(delivery.topic, delivery.group), message))

    def backlog(self, group: str) -> dict[str, int]:
        """Return how many messages wait in a group's queues, without those that consumers hold."""
        found = {}
        try:
            with self._questions.use() as connection:
                channel = connection.channel()
                for topic in self.topics:
                    try:
                        answer = channel.queue_declare(topology.queue_name(topic, group), passive=True)
                    except NotFound:
                        continue  # the channel was opened anew
                    assert answer is not None, "it is waited for"
                    found[topic] = answer[1]
                channel.close()
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not tell the backlog: {describe(error)}.") from error
        return found

    def dead_letters(self, group: str, *, limit: int = 100) -> list[DeadLetter]:
        """Return a group's dead letters, oldest first."""
        return self._letters.read(group, limit)

    def replay(self, group: str, letters: Sequence[str]) -> int:
        """Put dead letters back into their group's queue."""
        return self._letters.replay(group, letters)

    def discard(self, group: str, letters: Sequence[str]) -> int:
        """Delete dead letters."""
        return self._letters.discard(group, letters)

    def close(self) -> None:
        """Close all connections."""
        self._receiver.close()
        for connection in (self._publishing, self._questions):
            connection.close()

    def _reject(self, message: Outgoing) -> SendResult | None:
        """Return the result of a message that cannot be sent, or None."""
        if result := validate(message, self.topics, is_half=False, max_body_bytes=self.max_body_bytes):
            return result
        reason = too_large_for_amqp(message)
        return SendResult(SendStatus.REFUSED, reason=reason) if reason else None

    def _publication(self, message: Outgoing) -> Publication:
        delay = message.deliver_at - datetime.now(UTC) if message.deliver_at is not None else timedelta()
        if delay > timedelta():
            return self._delayed(to_amqp(message, destination=message.topic), delay, message.tag)
        return Publication(message.topic, message.tag, to_amqp(message))

    def _delayed(self, message: amqp.Message, delay: timedelta, tag: str) -> Publication:
        """Return a publication that reaches the message's destination after that time; the ladder counts whole seconds."""
        seconds = min(math.ceil(delay.total_seconds()), 2**topology.RUNGS - 1)
        return Publication(topology.rung(topology.RUNGS - 1), topology.delay_key(seconds, tag), message)

    def _replace(self, delivery: Delivery, copy: Publication) -> bool:
        """Publish a copy of a delivered message, then acknowledge the delivery. False: it is not ours any more."""
        if not self._held.is_held(delivery):
            return False
        self._publish_all([copy])
        return self._held.ack([delivery])[0]

    def _publish_all(self, publications: Sequence[Publication]) -> None:
        failed = [result for result in self._publisher.publish(publications) if result.status is not SendStatus.ACCEPTED]
        if failed:
            raise BrokerUnavailable(f"RabbitMQ did not store {len(failed)} messages: {failed[0].reason}")

    def _declare_topics(self, names: Collection[str]) -> dict[str, SendResult]:
        """Declare topics and the groups in OPTIONS, once for each connection; return results of those that failed."""
        failed: dict[str, SendResult] = {}
        for name in names:
            try:
                with self._publishing.use() as connection:
                    if self._declared.get(name) == self._publishing.serial or self._publishing.is_blocked:
                        continue
                    channel = connection.channel()
                    self._declare(channel, self.topics[name])
                    channel.close()
                    self._declared[name] = self._publishing.serial
            except BrokerUnavailable as error:
                return dict.fromkeys(names, SendResult(SendStatus.UNAVAILABLE, reason=str(error)))
            except ChannelError as error:
                failed[name] = SendResult(SendStatus.MISCONFIGURED, reason=_not_declared(name, error))
            except LOST as error:
                reason = f"The connection to RabbitMQ broke: {describe(error)}."
                return dict.fromkeys(names, SendResult(SendStatus.UNAVAILABLE, reason=reason))
        return failed

    def _declare(self, channel: amqp.Channel, topic: TopicSpec) -> None:
        if not self._has_ladder:
            topology.declare_ladder(channel)
            self._has_ladder = True
        try:
            topology.declare_topic(channel, topic)
            for group in self._settings.groups.get(topic.name, ()):
                self._declare_queues(channel, topic, group)
        except NotFound:
            self._has_ladder = False  # it was deleted
            raise

    def _declare_group(self, channel: amqp.Channel, group: str, topic: str) -> None:
        self._declare(channel, self.topics[topic])
        if group not in self._settings.groups.get(topic, ()):
            self._declare_queues(channel, self.topics[topic], group)

    def _declare_queues(self, channel: amqp.Channel, topic: TopicSpec, group: str) -> None:
        settings = self._settings
        topology.declare_group(channel, topic, group, delivery_limit=settings.delivery_limit, max_length=settings.max_length)


def _queue_of(delivery: Delivery) -> str:
    return topology.queue_name(delivery.topic, delivery.group)


def _not_declared(topic: str, error: Exception) -> str:
    return f"Exchange or a queue of topic {topic!r} cannot be declared: {describe(error)}."

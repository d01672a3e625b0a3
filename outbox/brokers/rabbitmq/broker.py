"""The RabbitMQ broker, whose calls are implemented by the other modules of this package."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import amqp
from amqp.exceptions import ChannelError

from outbox.brokers.base import Backlog, Delivery, Limits, Outgoing, SendResult, SendStatus, ServerResource, TopicSpec
from outbox.brokers.capabilities import HasDeadLetterQueue, ListsResources
from outbox.brokers.options import read_options
from outbox.brokers.owners import GroupOwner, OwnedByAnother
from outbox.brokers.rabbitmq import topology
from outbox.brokers.rabbitmq.asyncapi import RabbitMQInterface
from outbox.brokers.rabbitmq.client import LOST, RabbitMQConnection, describe
from outbox.brokers.rabbitmq.envelope import too_large
from outbox.brokers.rabbitmq.options import RabbitMQOptions, misspelt_groups, problems, with_groups
from outbox.brokers.rabbitmq.owners import RabbitMQOwners
from outbox.brokers.rabbitmq.receiver import CONSUMER_MARGIN, RabbitMQReceiver
from outbox.brokers.rabbitmq.resources import RabbitMQResources
from outbox.brokers.rabbitmq.sender import DeclarationMissing, RabbitMQSender
from outbox.brokers.rabbitmq.server_checks import ServerChecks
from outbox.brokers.validation import known_topic, send_valid
from outbox.errors import BrokerUnavailable, UnsupportedByBroker
from outbox.findings import Finding, wrong_option
from outbox.logs import get_logger

logger = get_logger(__name__)


class RabbitMQBroker(HasDeadLetterQueue, ListsResources):
    """
    Carries one-phase messages over RabbitMQ 3.10 and later; see docs/brokers/rabbitmq.md.

    Messages are published over one connection and received over another. While RabbitMQ is short of memory or disk, it blocks
    connections that publish, and acknowledgements must still reach it. A third connection, for administration, is opened on
    demand.

    Args:
        clock: returns seconds and never goes back; deliveries expire by it.
    """

    system: ClassVar[str] = "rabbitmq"
    interface = RabbitMQInterface
    supports_order: ClassVar[bool] = True

    def __init__(
        self,
        alias: str,
        options: Mapping[str, Any],
        topics: Sequence[TopicSpec],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(alias, options, topics)
        self._settings = with_groups(read_options(RabbitMQOptions, options), topics)
        self._publishing = RabbitMQConnection(self._settings, f"outbox {alias} publishing")
        self._admin_connection = RabbitMQConnection(self._settings, f"outbox {alias} questions")
        self._sender = RabbitMQSender(self._publishing, self._settings.request_timeout.total_seconds())
        self._owners = RabbitMQOwners()
        self._receiver = RabbitMQReceiver(self._settings, f"outbox {alias} receiving", self.topics, self._declare_owned, clock)
        self.refusals = self._receiver.refusals
        self._declared: dict[str, int] = {}  # topic -> serial of the connection over which it is declared

    @classmethod
    def check_settings(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec] = ()) -> list[Finding]:
        """Return problems of the OPTIONS. If there are none, return problems of topics, and groups of unknown topics."""
        if findings := problems(options):
            return findings
        names = {topic.name for topic in topics}
        findings = [
            wrong_option(
                f'OPTIONS["GROUPS"] names topic {name!r}, which this broker does not have.', "Correct it, or add the topic."
            )
            for name in read_options(RabbitMQOptions, options).groups
            if name not in names
        ]
        findings += misspelt_groups(read_options(RabbitMQOptions, options), topics)
        for topic in topics:
            if topic.retention > topology.MAX_RETENTION:
                text = f'OUTBOX["TOPICS"]["{topic.name}"]["RETENTION"] is {topic.retention}, which RabbitMQ does not allow.'
                findings.append(wrong_option(text, f"Set it to {topology.MAX_RETENTION.days} days or less."))
        return findings

    @classmethod
    def limits(cls, options: Mapping[str, Any], topic: TopicSpec) -> Limits:
        """
        Return the limits. A send may connect to any node, declare queues, and wait for the confirms.

        A message can be redelivered as long as it is in the group's queue, which is for the topic's retention, and then from the
        dead-letter queue, which `may_deliver_again` takes into account.
        """
        settings = read_options(RabbitMQOptions, options)
        return Limits(
            send=(len(settings.nodes) + 2) * settings.request_timeout,
            handling=settings.consumer_timeout * CONSUMER_MARGIN,
            redelivery=topic.retention,
        )

    def check(self) -> list[Finding]:
        """Return problems of the options, the nodes, declarations on the server, and permissions; see `server_checks`."""
        if findings := self.check_settings(self.options, list(self.topics.values())):
            return findings
        return ServerChecks(self._settings, self._admin_connection, self.topics.values(), self._owners).problems()

    def list_resources(self, *, sources: Collection[str], lanes: int, readers: Collection[str]) -> list[ServerResource]:
        """Return the exchanges and queues. Readers get no queues, because messages would pile up in them."""
        return RabbitMQResources(self._settings, self._admin_channel, self.topics.values()).find()

    def set_owner(
        self, group: str, source: str, project: str, *, known_topics: Collection[str] = (), take_over: bool = False
    ) -> None:
        """
        Set the owner of a group, which is stored on the server before the first receive; see owners.py.

        Clients of an earlier owner that are connected keep receiving until they connect again.
        """
        self._owners.set(group, GroupOwner.of(source, project))
        if not take_over:
            return
        try:
            with self._admin_channel("change the group's owner") as channel:
                self._owners.take_over(channel, self.topics, group)
        except OwnedByAnother as error:
            raise BrokerUnavailable(
                f"A consumer of {error.theirs} has received for group {group!r} at the same time.",
                hint="Stop its consumers, and take the group over again.",
            ) from error

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        return send_valid(self, messages, self._send)

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages for a group. Its queues are declared before."""
        for topic in topics:
            known_topic(self.topics, topic)
        return self._receiver.receive(group, topics, limit=limit, invisible_for=invisible_for, wait=wait)

    def interrupt(self) -> None:
        self._receiver.interrupt()

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries for that time from now. None if that is too close to CONSUMER_TIMEOUT after the server's push."""
        return self._receiver.renew(deliveries, invisible_for)

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Make messages available again, each at its position. If this process does not receive soon, another one gets them."""
        self._receiver.release(deliveries)

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledge deliveries. RabbitMQ does not answer, so if the connection breaks now, messages may be delivered again."""
        return self._receiver.ack(deliveries)

    def receive_dead_letters(self, group: str, topics: Collection[str], *, limit: int) -> list[Delivery]:
        for topic in topics:
            known_topic(self.topics, topic)
        return self._receiver.receive_dead_letters(group, topics, limit)

    def may_deliver_again(self, group: str, message_ids: Collection[str]) -> set[str]:
        """Return all of the ids while a message is in a dead-letter queue of the group, because it may be any of these."""
        return set(message_ids) if self.backlog(group).dead_letters else set()

    def backlog(self, group: str) -> Backlog:
        """Return the number of messages in a group's queues, without those that consumers hold, and in its dead-letter queues."""
        with self._admin_channel("tell the backlog") as channel:
            queues = {topic: topology.state_of(channel, topology.queue_name(topic, group)) for topic in self.topics}
            dead_letter_queues = {
                topic: topology.state_of(channel, topology.dead_letter_queue_name(topic, group)) for topic in self.topics
            }
        dead_letters = {topic: state[0] for topic, state in dead_letter_queues.items() if state and state[0]}
        return Backlog({topic: state[0] for topic, state in queues.items() if state}, dead_letters)

    def forget_group(self, group: str, topics: Collection[str]) -> None:
        """
        Delete the group's queues and its owner on the server, also for topics that are no longer in settings.

        Raises:
            UnsupportedByBroker: OPTIONS["GROUPS"] names the group.
            BrokerUnavailable: a consumer receives from a queue.
        """
        self._require_owner(group)
        for topic in topics:
            if group in self._settings.groups.get(topic, ()):
                raise UnsupportedByBroker(
                    f'OPTIONS["GROUPS"] of broker {self.alias!r} names group {group!r} for topic {topic!r}, so relays would '
                    "declare its queue again.",
                    hint="Remove the group there, and restart the relays.",
                )
        with self._admin_channel("delete the group's queues") as channel:
            queues = [queue for topic in topics for queue in topology.group_queues(topic, group)]
            for queue in queues:
                if (state := topology.state_of(channel, queue)) and state[1]:
                    raise BrokerUnavailable(
                        f"A consumer receives from queue {queue!r}.", hint="Stop the consumer, and try again."
                    )
            for queue in queues:
                channel.queue_delete(queue)
            for topic in topics:
                channel.exchange_delete(topology.queue_name(topic, group))

    def close(self) -> None:
        self._receiver.close()
        for connection in (self._publishing, self._admin_connection):
            connection.close()

    def _send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send messages. If a queue or an exchange has been deleted, declare everything again, and send once more."""
        try:
            return self._send_once(messages)
        except DeclarationMissing:
            self._declared.clear()
            self._receiver.forget_declarations()
        try:
            return self._send_once(messages)
        except DeclarationMissing as error:
            reason = f"A queue or an exchange was deleted again after it had been declared: {error}."
            return [SendResult(SendStatus.UNAVAILABLE, reason=reason)] * len(messages)

    def _send_once(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send messages. Raises DeclarationMissing."""
        topics = {message.topic for message in messages}
        failed = self._declare_topics(topics)
        results = {
            index: result for index, message in enumerate(messages) if (result := failed.get(message.topic) or too_large(message))
        }
        good = [index for index in range(len(messages)) if index not in results]
        # The queues of known groups, which are in OPTIONS or have a @consumer in this process's code.
        queues = [
            (topic, topology.queue_name(topic, group))
            for topic in topics - failed.keys()
            for group in self._settings.groups.get(topic, ())
        ]
        for index, result in zip(good, self._sender.publish([messages[index] for index in good], queues=queues), strict=True):
            results[index] = result
            if result.status is SendStatus.MISCONFIGURED:
                self._declared.pop(messages[index].topic, None)
        return [results[index] for index in range(len(messages))]

    def _declare_topics(self, names: Collection[str]) -> dict[str, SendResult]:
        """Declare topics and the queues of known groups, once for each connection. Return the results of topics that failed."""
        failed: dict[str, SendResult] = {}
        for name in names:
            try:
                with self._publishing.use() as connection:
                    if self._declared.get(name) == self._publishing.serial or self._publishing.is_blocked:
                        continue
                    with closing(connection.channel()) as channel:
                        self._declare(channel, name, self._settings.groups.get(name, ()))
                    self._declared[name] = self._publishing.serial
            except BrokerUnavailable as error:
                return dict.fromkeys(names, SendResult(SendStatus.UNAVAILABLE, reason=str(error)))
            except ChannelError as error:
                reason = f"The exchange or a queue of topic {name!r} cannot be declared: {describe(error)}."
                failed[name] = SendResult(SendStatus.MISCONFIGURED, reason=reason)
            except LOST as error:
                reason = f"The connection to RabbitMQ broke: {describe(error)}."
                return dict.fromkeys(names, SendResult(SendStatus.UNAVAILABLE, reason=reason))
        return failed

    def _require_owner(self, group: str) -> None:
        """Raise BrokerUnavailable if the group belongs to another project."""
        try:
            with self._admin_channel("tell the group's owner") as channel:
                self._owners.require(channel, self.topics, group)
        except OwnedByAnother as error:
            raise BrokerUnavailable(*error.args) from error

    def _declare_owned(self, channel: amqp.Channel, group: str, topic: str) -> None:
        """Store the owner of a group, and declare its queues, before it receives. Raises OwnedByAnother."""
        self._owners.claim(channel, topic, group)
        self._declare(channel, topic, {group, *self._settings.groups.get(topic, ())})

    def _declare(self, channel: amqp.Channel, topic: str, groups: Collection[str]) -> None:
        """Declare a topic and the queues of groups. Raises amqp.ChannelError if the server refuses, or has different ones."""
        topology.declare_topic(channel, self.topics[topic])
        for group in groups:
            topology.declare_group(channel, self.topics[topic], group, max_length=self._settings.max_length)

    @contextmanager
    def _admin_channel(self, action: str) -> Iterator[amqp.Channel]:
        """
        Yield a channel for administration, and close it.

        Args:
            action: what fails after an error, for the text of BrokerUnavailable.
        """
        try:
            with self._admin_connection.use() as connection:
                channel = connection.channel()
                yield channel
                channel.close()
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not {action}: {describe(error)}.") from error

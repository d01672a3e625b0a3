"""
Checks of the running server, for `Broker.check()`, with the means of an AMQP client. `management.py` uses the HTTP API.

The checks change nothing on the server, except that missing exchanges and queues are declared with their bindings, as for a send.
A finding reports this if other exchanges or queues of the topic exist. Permissions are checked with requests that the server,
after it has checked the permission, refuses or executes without an effect.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, ChannelError, NotFound, PreconditionFailed

from outbox.brokers.owners import OwnedByAnother
from outbox.brokers.rabbitmq import topology
from outbox.brokers.rabbitmq.client import LOST, RabbitMQConnection, connect, describe
from outbox.brokers.rabbitmq.management import problems_of_queues
from outbox.brokers.rabbitmq.options import RabbitMQOptions, addresses
from outbox.brokers.rabbitmq.owners import RabbitMQOwners
from outbox.brokers.rabbitmq.permissions import Permissions
from outbox.errors import BrokerUnavailable
from outbox.findings import Finding, misconfigured, unavailable, weak
from outbox.message import TopicSpec

MIN_VERSION = (3, 10)
MIN_FRAME_BYTES = 131_072  # RabbitMQ's default; all headers of a message must fit into one frame
ALARM = "RabbitMQ accepts no messages: it blocks connections that publish, because a node is short of memory or disk."
ALARM_HINT = (
    "`rabbitmqctl status` shows the alarms. Free disk space, drain the queues, or raise vm_memory_high_watermark. Until then, "
    "messages wait in the outbox."
)
CAPABILITIES = {  # capability -> the effect of its absence
    "publisher_confirms": "no message is known to be stored",
    "basic.nack": "a full queue loses messages",
    "consumer_cancel_notify": "a consumer does not notice that its queue was deleted",
    "connection.blocked": "an alarm looks like a server that does not answer",
}
# Argument of a queue -> the setting that it is made from.
SETTINGS_OF_ARGUMENTS = {
    "x-message-ttl": 'the RETENTION of the topic in OUTBOX["TOPICS"]',
    "x-max-length": 'OPTIONS["MAX_LENGTH"]',
    "x-single-active-consumer": 'the TYPE of the topic in OUTBOX["TOPICS"]',
}


class ServerChecks:
    """
    Checks of the nodes, of exchanges and queues, and of the permissions of our user.

    Args:
        connection: a connection that is not used for publishing otherwise, because an alarm blocks it.
        owners: the owners of this project's groups.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        connection: RabbitMQConnection,
        topics: Iterable[TopicSpec],
        owners: RabbitMQOwners,
    ) -> None:
        self._options = options
        self._connection = connection
        self._topics = list(topics)
        self._owners = owners
        self._permissions = Permissions(options.user, options.virtual_host, [topic.name for topic in self._topics])

    def problems(self) -> list[Finding]:
        """Return all problems. Raises BrokerUnavailable."""
        try:
            with self._connection.use():  # raises BrokerUnavailable if no node answers, instead of a finding for each node
                pass
            findings = [*self._problems_of_nodes()]
            with self._connection.use() as connection:
                channel = connection.channel()
                declared = [*self._problems_of_declarations(channel)]
                findings += declared or self._permissions.problems_of_groups(channel, self._groups())
                findings += self._problems_of_owners(channel)
                channel.close()
            findings += problems_of_queues(self._options, [(topic.name, group) for topic, group in self._groups()])
            return findings + self._problems_of_publishing()
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not answer: {describe(error)}.") from error

    def _groups(self) -> list[tuple[TopicSpec, str]]:
        return [(topic, group) for topic in self._topics for group in self._options.groups.get(topic.name, ())]

    def _problems_of_nodes(self) -> Iterator[Finding]:
        clusters: dict[str, list[str]] = {}  # name of a cluster -> its nodes
        for address in addresses(self._options):
            try:
                properties, frame_bytes = self._server_properties(address)
            except LOST as error:
                hint = 'Start it, or remove it from OPTIONS["NODES"]. Until then, there are fewer nodes to fail over to.'
                yield weak(f"Node {address} does not answer: {describe(error)}.", hint)
                continue
            yield from problems_of_node(address, properties, frame_bytes)
            clusters.setdefault(str(properties.get("cluster_name", "")), []).append(address)
        if len(clusters) > 1:
            parts = "; ".join(f"{name or 'one without a name'}: {', '.join(nodes)}" for name, nodes in clusters.items())
            yield misconfigured(
                f'OPTIONS["NODES"] names nodes of {len(clusters)} clusters ({parts}). Messages go to the cluster that answers '
                "first, and consumers of another one never get them.",
                "Join the nodes to one cluster, or name the nodes of one cluster only.",
            )

    def _server_properties(self, address: str) -> tuple[dict[str, Any], int]:
        """Return a node's server properties in the AMQP handshake, and the maximum frame size that was agreed."""
        connection = connect(self._options, address, "outbox check")
        properties: dict[str, Any] = connection.server_properties  # type: ignore[attr-defined]  # the stubs lack it
        with suppress(*LOST), connection.transport.having_timeout(self._options.request_timeout.total_seconds()):
            connection.close()
        return properties, connection.frame_max

    def _problems_of_declarations(self, channel: amqp.Channel) -> Iterator[Finding]:
        """
        Declare missing exchanges and queues. Yield those that were missing, and those that exist with other arguments.

        An existing queue is not bound again unless its exchange was missing.
        """
        for topic in self._topics:
            queues = {group: topology.queue_name(topic.name, group) for group in self._options.groups.get(topic.name, ())}
            existing_groups = {
                group for group, queue in queues.items() if _exists(partial(channel.queue_declare, queue, passive=True))
            }
            is_exchange_missing = not _exists(partial(channel.exchange_declare, topic.name, "topic", passive=True))
            if problem := self._declare_checked(f"Topic {topic.name!r}", partial(topology.declare_topic, channel, topic)):
                yield problem
                continue
            for group, queue in queues.items():
                subject = f"Group {group!r} of topic {topic.name!r}"
                only_type = partial(channel.queue_declare, queue, durable=True, auto_delete=False, arguments=topology.QUORUM)
                declare = partial(
                    topology.declare_group,
                    *(channel, topic, group),
                    max_length=self._options.max_length,
                    is_bound=group in existing_groups and not is_exchange_missing,
                )
                if problem := self._declare_checked(subject, declare, only_type):
                    yield problem
                    existing_groups.discard(group)
                elif group not in existing_groups and not is_exchange_missing:
                    text = f"Queue {queue!r} was missing and has been declared: group {group!r} gets nothing sent before."
                    hint = "If the group is not new, find out who deleted the queue, and send the missed messages again."
                    yield weak(text, hint)
            if is_exchange_missing and existing_groups:
                text = f"Topic {topic.name!r} was missing and has been declared: its groups get nothing that was sent meanwhile."
                yield weak(text, "Find out who deleted the exchange, and send the missed messages again.")

    def _problems_of_owners(self, channel: amqp.Channel) -> Iterator[Finding]:
        """Yield groups of this project whose queues belong to another project."""
        for group in self._owners.groups():
            for topic in self._topics:
                try:
                    self._owners.require(channel, [topic.name], group)
                except OwnedByAnother as error:
                    yield misconfigured(*error.args)
                except AccessRefused as error:
                    yield self._permissions.problem(f"Group {group!r} of topic {topic.name!r}", error)

    def _declare_checked(
        self, subject: str, declare: Callable[[], object], only_type: Callable[[], object] = lambda: None
    ) -> Finding | None:
        """
        Declare a topic or a group, and return the problem if the server refuses.

        Args:
            only_type: declares a queue with its type as the only argument, to find out whether the type is wrong, too: the server
                names one difference only, and the type only if nothing else differs.
        """
        try:
            declare()
        except AccessRefused as error:
            return self._permissions.problem(subject, error)
        except ChannelError as error:
            try:
                only_type()
            except ChannelError as other:
                error = other if "'x-queue-type'" in describe(other) else error
            return misconfigured(f"{subject} cannot be declared: {describe(error)}.", _hint_for(error))
        return None

    def _problems_of_publishing(self) -> list[Finding]:
        """Publish a message that no queue takes. Permissions and alarms show in the server's answer."""
        try:
            return [] if self._is_returned() else [unavailable(ALARM, ALARM_HINT)]
        except AccessRefused as error:
            return [self._permissions.problem("The default exchange", error)]

    def _is_returned(self) -> bool:
        """Return whether a message without a queue is returned. False if the connection is blocked instead."""
        returned: list[object] = []
        with self._connection.use() as connection:
            channel = connection.channel()
            events: dict[str, Any] = channel.events  # type: ignore[attr-defined]  # the stubs lack it
            events["basic_return"] = {lambda *arguments: returned.append(arguments)}
            channel.send_method(
                spec.Basic.Publish, "Bssbb", (0, "", f"outbox-check-{uuid.uuid4().hex}", True, False), amqp.Message(b"")
            )
            while not returned and not self._connection.is_blocked:
                connection.drain_events(timeout=self._options.request_timeout.total_seconds())
            if returned:
                channel.close()
                return True
        self._connection.drop()  # the server does not answer on it until the alarm is over
        return False


def problems_of_node(node: str, properties: Mapping[str, Any], frame_bytes: int) -> Iterator[Finding]:
    """
    Yield requirements that a node does not meet.

    Args:
        node: host:port.
        properties: the server properties of the AMQP handshake.
        frame_bytes: the maximum frame size of the handshake.
    """
    product, version = str(properties.get("product", "")), str(properties.get("version", ""))
    if product != "RabbitMQ":
        text = (
            f"Node {node} is {product or 'a server without a name'} {version}, not RabbitMQ. The outbox was not tested with it."
        )
        yield weak(text, "Use RabbitMQ 3.10 or later.")
    elif _numbers(version) < MIN_VERSION:
        yield misconfigured(
            f"Node {node} runs RabbitMQ {version}, but 3.10 is needed. Quorum queues of earlier versions support neither a "
            "message's time to live nor at-least-once dead lettering, so no queue can be declared.",
            "Upgrade the node, and then run `rabbitmqctl enable_feature_flag all`.",
        )
    capabilities = properties.get("capabilities") or {}
    for name, loss in CAPABILITIES.items():
        if not capabilities.get(name):
            hint = "Use RabbitMQ 3.10 or later, without a proxy that hides this capability."
            yield misconfigured(f"Node {node} does not offer {name}: {loss}.", hint)
    if 0 < frame_bytes < MIN_FRAME_BYTES:
        yield misconfigured(
            f"Node {node} has frame_max = {frame_bytes}: a message whose headers do not fit into one frame ends the "
            "connection, and is sent again forever.",
            f"Set frame_max = {MIN_FRAME_BYTES}, the default, in rabbitmq.conf.",
        )


def _hint_for(error: ChannelError) -> str:
    if not isinstance(error, PreconditionFailed):
        return "Run the check again. If the error persists, read the log of the node."
    source = next((source for name, source in SETTINGS_OF_ARGUMENTS.items() if f"'{name}'" in describe(error)), "")
    correct = f"set {source} as it was declared" if source else "rename the topic or the group"
    return f"Delete it when it is empty (it is declared again), or {correct}."


def _exists(declare: Callable[[], object]) -> bool:
    """Return whether a passive declaration does not fail with NotFound. Other errors will show in the actual declaration."""
    try:
        declare()
    except NotFound:
        return False
    except ChannelError:
        pass
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())

"""
What is declared on the server: names and arguments of exchanges and queues.

A topic is a durable topic exchange, and a tag is the routing key. Each consumer group of a topic has two quorum queues: one that
is bound to all tags, and its *inlet*, into which the server puts messages that it gives up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import amqp
import msgspec
from amqp.exceptions import NotFound

from outbox.message import TopicSpec, TopicType

OWNER = "outbox.owner."  # begins the name of a group's owner (owners.py)

MAX_RETENTION = timedelta(days=10 * 365)  # the server's limit for x-message-ttl
MOST_AT_ONCE = 65_535  # messages of one subscription

ALL_TAGS = "#"  # the routing key of a group's binding

QUORUM = {"x-queue-type": "quorum"}
# A message that expires is forgotten only when the next queue has confirmed it.
AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


def queue_name(topic: str, group: str) -> str:
    """Return the name of a group's queue."""
    return f"{topic}:{group}"


def inlet_name(topic: str, group: str) -> str:
    """Return the name of the queue of a group's messages that the server gave up."""
    return f"{topic}:{group}:given-up"


def group_queues(topic: str, group: str) -> list[str]:
    """Return the queues of a group: that of its messages, and its inlet."""
    return [queue_name(topic, group), inlet_name(topic, group)]


def declare_topic(channel: amqp.Channel, topic: TopicSpec) -> None:
    """
    Declare a topic's exchange.

    Raises:
        amqp.PreconditionFailed: there is one of that name with other arguments; its text names the difference.
    """
    channel.exchange_declare(topic.name, "topic", durable=True, auto_delete=False)


class GroupQueue(msgspec.Struct, frozen=True):
    """
    A queue of a group as it is declared.

    Args:
        bindings: exchange and routing key of each.
    """

    name: str
    arguments: Mapping[str, Any]
    bindings: Sequence[tuple[str, str]] = ()

    def declare(self, channel: amqp.Channel) -> None:
        """
        Declare the queue, and bind it to nothing.

        Raises:
            amqp.PreconditionFailed: as for `declare_topic`.
        """
        channel.queue_declare(self.name, durable=True, auto_delete=False, arguments=self.arguments)

    def declare_and_bind(self, channel: amqp.Channel) -> None:
        """Declare the queue and its bindings. Raises as `declare`."""
        self.declare(channel)
        for exchange, routing_key in self.bindings:
            channel.queue_bind(self.name, exchange, routing_key=routing_key)


def queues_of_group(channel: amqp.Channel, topic: TopicSpec, group: str, *, max_length: int | None) -> Iterator[GroupQueue]:
    """Yield a group's queues, in the order in which they are declared, after the topic."""
    inlet = inlet_name(topic.name, group)
    yield GroupQueue(inlet, {**quorum(channel), "x-overflow": "reject-publish"})
    arguments: dict[str, Any] = {
        **quorum(channel),
        **AT_LEAST_ONCE,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": inlet,
        "x-message-ttl": int(topic.retention.total_seconds() * 1000),
    }
    if topic.type is TopicType.FIFO:
        arguments["x-single-active-consumer"] = True
    if max_length is not None:
        arguments["x-max-length"] = max_length
    yield GroupQueue(queue_name(topic.name, group), arguments, [(topic.name, ALL_TAGS)])


def declare_group(channel: amqp.Channel, topic: TopicSpec, group: str, *, max_length: int | None, is_bound: bool = False) -> None:
    """
    Declare a group's queues, and bind them to the topic, which is declared already.

    Args:
        is_bound: leave the bindings as they are.

    Raises:
        amqp.PreconditionFailed: as for `declare_topic`.
    """
    for queue in queues_of_group(channel, topic, group, max_length=max_length):
        queue.declare(channel) if is_bound else queue.declare_and_bind(channel)


def state_of(channel: amqp.Channel, queue: str) -> tuple[int, int] | None:
    """Return how many messages of a queue can be delivered, and how many consumers it has; None: there is no such queue."""
    try:
        answer = channel.queue_declare(queue, passive=True)
    except NotFound:
        return None  # the channel was opened anew
    return None if answer is None else (int(answer[1]), int(answer[2]))


def quorum(channel: amqp.Channel) -> dict[str, Any]:
    """
    Return the arguments of a quorum queue that keeps a message however often it is delivered.

    A process that closes its connection is not the message's failure; consumers count failures and crashes themselves. RabbitMQ
    4.0 and later give a message up after 20 deliveries unless a queue says otherwise.
    """
    version = str(channel.connection.server_properties.get("version", ""))
    return {**QUORUM, "x-delivery-limit": -1} if int(version.partition(".")[0] or 0) >= 4 else dict(QUORUM)

"""
The exchanges and queues that are declared on the server: their names and arguments.

A topic is a durable topic exchange, and a tag is the routing key. Each consumer group of a topic has two quorum queues: one for
its messages, which is bound to all tags, and a dead-letter queue of the first one, to which the server moves
messages that have expired, or that a policy removes. Consumers store them in the group's inbox, as dead letters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import amqp
import msgspec
from amqp.exceptions import NotFound

from outbox.message import TopicSpec, TopicType

OWNER = "outbox.owner."  # the prefix of the value that names a group's owner (owners.py)

MAX_RETENTION = timedelta(days=10 * 365)  # the server's limit for x-message-ttl
MAX_PREFETCH = 65_535  # AMQP's limit

ALL_TAGS = "#"  # the routing key of a group's binding

QUORUM = {"x-queue-type": "quorum"}
# An expired message is removed only after the dead-letter queue has confirmed it.
AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


def queue_name(topic: str, group: str) -> str:
    """Return the name of a group's queue."""
    return f"{topic}:{group}"


def dead_letter_queue_name(topic: str, group: str) -> str:
    """Return the name of a group's dead-letter queue."""
    return f"{topic}:{group}:given-up"


def group_queues(topic: str, group: str) -> list[str]:
    """Return the names of a group's queues: the queue of its messages, and its dead-letter queue."""
    return [queue_name(topic, group), dead_letter_queue_name(topic, group)]


def declare_topic(channel: amqp.Channel, topic: TopicSpec) -> None:
    """
    Declare a topic's exchange.

    Raises:
        amqp.PreconditionFailed: an exchange of that name has other arguments; the text of the error names the difference.
    """
    channel.exchange_declare(topic.name, "topic", durable=True, auto_delete=False)


class GroupQueue(msgspec.Struct, frozen=True):
    """
    The declaration of a group's queue.

    Args:
        bindings: the exchange and the routing key of each binding.
    """

    name: str
    arguments: Mapping[str, Any]
    bindings: Sequence[tuple[str, str]] = ()

    def declare(self, channel: amqp.Channel) -> None:
        """
        Declare the queue without its bindings.

        Raises:
            amqp.PreconditionFailed: a queue of that name has other arguments.
        """
        channel.queue_declare(self.name, durable=True, auto_delete=False, arguments=self.arguments)

    def declare_and_bind(self, channel: amqp.Channel) -> None:
        """Declare the queue and its bindings. Raises the same errors as `declare`."""
        self.declare(channel)
        for exchange, routing_key in self.bindings:
            channel.queue_bind(self.name, exchange, routing_key=routing_key)


def queues_of_group(channel: amqp.Channel, topic: TopicSpec, group: str, *, max_length: int | None) -> Iterator[GroupQueue]:
    """Yield a group's queues in the order in which they have to be declared. Their topic is declared before them."""
    dead_letter_queue = dead_letter_queue_name(topic.name, group)
    yield GroupQueue(dead_letter_queue, {**quorum(channel), "x-overflow": "reject-publish"})
    arguments: dict[str, Any] = {
        **quorum(channel),
        **AT_LEAST_ONCE,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead_letter_queue,
        "x-message-ttl": int(topic.retention.total_seconds() * 1000),
    }
    if topic.type is TopicType.FIFO:
        arguments["x-single-active-consumer"] = True
    if max_length is not None:
        arguments["x-max-length"] = max_length
    yield GroupQueue(queue_name(topic.name, group), arguments, [(topic.name, ALL_TAGS)])


def declare_group(channel: amqp.Channel, topic: TopicSpec, group: str, *, max_length: int | None, is_bound: bool = False) -> None:
    """
    Declare a group's queues, and bind them to the topic, which must be declared already.

    Args:
        is_bound: whether the queues are bound already, so that this does not bind them.

    Raises:
        amqp.PreconditionFailed: a queue of that name has other arguments.
    """
    for queue in queues_of_group(channel, topic, group, max_length=max_length):
        queue.declare(channel) if is_bound else queue.declare_and_bind(channel)


def state_of(channel: amqp.Channel, queue: str) -> tuple[int, int] | None:
    """Return how many messages of a queue can be delivered, and how many consumers it has; None if there is no such queue."""
    try:
        answer = channel.queue_declare(queue, passive=True)
    except NotFound:
        return None  # py-amqp has opened the channel again
    return None if answer is None else (int(answer[1]), int(answer[2]))


def quorum(channel: amqp.Channel) -> dict[str, Any]:
    """
    Return the arguments of a quorum queue without a delivery limit.

    RabbitMQ 4.0 and later remove a message after 20 deliveries unless the queue's arguments say otherwise. But a message is also
    delivered again after a process has closed its connection, which is no failure of the message. Consumers count failures and
    crashes themselves.
    """
    version = str(channel.connection.server_properties.get("version", ""))
    return {**QUORUM, "x-delivery-limit": -1} if int(version.partition(".")[0] or 0) >= 4 else dict(QUORUM)

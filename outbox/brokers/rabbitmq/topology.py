"""
What is declared on the server: names and arguments of exchanges and queues.

A topic is a durable topic exchange, and a tag is the routing key. Each consumer group of a topic has a quorum queue, bound to
all tags, and a second one for its dead letters. A delayed message passes a ladder of queues first: each rung waits twice as
long as the one below, a message enters those whose seconds add up to its delay, and the last rung hands it to the exchange
`outbox.due`, which finds its destination in a header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import amqp

from outbox.message import TopicSpec, TopicType

DUE = "outbox.due"  # headers exchange behind the ladder
DESTINATION = "outbox-to"  # the header that it looks at
RUNGS = 20
MAX_DELAY = timedelta(seconds=2**RUNGS - 1)  # 12 days

MAX_RETENTION = timedelta(days=10 * 365)  # the server's limit for x-message-ttl
MOST_AT_ONCE = 65_535  # messages of one subscription

QUORUM = {"x-queue-type": "quorum"}
# A queue of the ladder forgets a message only when the next queue has confirmed it.
AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


def queue_name(topic: str, group: str) -> str:
    """Return the name of a group's queue."""
    return f"{topic}:{group}"


def dead_queue_name(topic: str, group: str) -> str:
    """Return the name of the queue of a group's dead letters."""
    return f"{topic}:{group}:dead"


def rung(number: int) -> str:
    """Return the name of a rung's queue and exchange; rung 0 waits a second."""
    return f"outbox.delay.{number}"


def delay_key(seconds: int, tag: str) -> str:
    """Return the routing key that takes a message through the ladder: a word for each rung, the longest first, then the tag."""
    bits = ".".join("1" if seconds >> number & 1 else "0" for number in reversed(range(RUNGS)))
    return f"{bits}.{tag}"


def queues_of(topics: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the names of all queues of topics and their groups, the ladder included."""
    groups = [(topic, group) for topic, names in topics.items() for group in names]
    found = {name(topic, group) for topic, group in groups for name in (queue_name, dead_queue_name)}
    return found | {rung(number) for number in range(RUNGS)}


def declare_topic(channel: amqp.Channel, topic: TopicSpec) -> None:
    """
    Declare a topic's exchange. The ladder is there already.

    Raises:
        amqp.PreconditionFailed: there is one of that name with other arguments; its text names the difference.
    """
    channel.exchange_declare(topic.name, "topic", durable=True, auto_delete=False)
    if topic.type is TopicType.DELAY:
        channel.exchange_bind(topic.name, DUE, arguments=_for(topic.name))


def declare_group(channel: amqp.Channel, topic: TopicSpec, group: str, *, delivery_limit: int, max_length: int | None) -> None:
    """
    Declare a group's queues, and bind them to the topic.

    Raises:
        amqp.PreconditionFailed: as for `declare_topic`.
    """
    queue, dead = queue_name(topic.name, group), dead_queue_name(topic.name, group)
    unlimited = _no_delivery_limit(channel)
    arguments: dict[str, Any] = {
        **QUORUM,
        **AT_LEAST_ONCE,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead,
        "x-message-ttl": int(topic.retention.total_seconds() * 1000),
    }
    if topic.type is TopicType.FIFO:  # what is fetched and goes back unhandled counts, and a dead letter would break the order
        arguments |= {"x-single-active-consumer": True, **unlimited}
    else:
        arguments["x-delivery-limit"] = delivery_limit
    if max_length is not None:
        arguments["x-max-length"] = max_length
    channel.queue_declare(dead, durable=True, auto_delete=False, arguments={**QUORUM, **unlimited})
    channel.queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)
    channel.queue_bind(queue, topic.name, routing_key="#")
    channel.queue_bind(queue, DUE, arguments=_for(queue))


def declare_ladder(channel: amqp.Channel) -> None:
    """Declare the queues and exchanges that delay messages."""
    channel.exchange_declare(DUE, "headers", durable=True, auto_delete=False)
    for number in range(RUNGS):
        below = rung(number - 1) if number else DUE
        channel.exchange_declare(rung(number), "topic", durable=True, auto_delete=False)
        arguments = {**QUORUM, **AT_LEAST_ONCE, "x-message-ttl": 1000 << number, "x-dead-letter-exchange": below}
        channel.queue_declare(rung(number), durable=True, auto_delete=False, arguments=arguments)
        before = "*." * (RUNGS - 1 - number)
        channel.queue_bind(rung(number), rung(number), routing_key=f"{before}1.#")
        channel.exchange_bind(below, rung(number), routing_key=f"{before}0.#")


def _for(destination: str) -> Mapping[str, str]:
    return {"x-match": "all", DESTINATION: destination}


def _no_delivery_limit(channel: amqp.Channel) -> dict[str, Any]:
    """Return what lets a queue keep a message however often it is delivered; from 4.0 on, 20 times is the default."""
    version = str(channel.connection.server_properties.get("version", ""))
    return {"x-delivery-limit": -1} if int(version.partition(".")[0] or 0) >= 4 else {}

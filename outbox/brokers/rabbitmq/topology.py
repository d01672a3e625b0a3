"""
What is declared on the server: names and arguments of exchanges and queues.

A topic is a durable topic exchange, and a tag is the routing key. Each consumer group of a topic has two quorum queues: one that
is bound to all tags, and its *inlet*, into which the server puts messages that it gives up.

A message of a topic of type delay passes delay queues first: each waits twice as long as the one below, a message enters those
whose seconds add up to its delay, and the last one hands it to the exchange `outbox.due`, which finds its destination in a
header. A delay queue forgets a message only when the next queue has confirmed it, and waits for 32 confirms at most. So a delayed
message never meets a queue that is full or missing: each group has a third queue for due messages, without a limit, and a message
without a destination goes to the queue `outbox.undeliverable`. It is brought back from there when a destination is declared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import amqp
from amqp.exceptions import NotFound

from outbox.message import TopicSpec, TopicType

DUE = "outbox.due"  # headers exchange behind the delay queues
DESTINATION = "outbox-to"  # the header that it looks at
UNDELIVERABLE = "outbox.undeliverable"  # exchange and queue for what reaches no queue behind a delay
OWNER = "outbox.owner."  # begins the name of a group's owner (owners.py)
DELAYS = "outbox.delay."  # a delay queue and its exchange have a number behind it
DELAY_QUEUES = 20  # their number
MAX_DELAY = timedelta(seconds=2**DELAY_QUEUES - 1)  # 12 days

MAX_RETENTION = timedelta(days=10 * 365)  # the server's limit for x-message-ttl
MOST_AT_ONCE = 65_535  # messages of one subscription

QUORUM = {"x-queue-type": "quorum"}
# A message that expires is forgotten only when the next queue has confirmed it.
AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


def queue_name(topic: str, group: str) -> str:
    """Return the name of a group's queue."""
    return f"{topic}:{group}"


def due_queue_name(topic: str, group: str) -> str:
    """Return the name of the queue of a group's messages whose delay is over."""
    return f"{topic}:{group}:due"


def inlet_name(topic: str, group: str) -> str:
    """Return the name of the queue of a group's messages that the server gave up."""
    return f"{topic}:{group}:given-up"


def delay_queue(number: int) -> str:
    """Return the name of a delay queue and of its exchange; number 0 waits a second."""
    return f"{DELAYS}{number}"


def delay_key(seconds: int, tag: str) -> str:
    """Return the routing key for a delay: a word for each delay queue, the longest first, then the tag."""
    bits = ".".join("1" if seconds >> number & 1 else "0" for number in reversed(range(DELAY_QUEUES)))
    return f"{bits}.{tag}"


def group_queues(topic: TopicSpec, group: str) -> list[str]:
    """Return the queues that a group receives from."""
    due = [due_queue_name(topic.name, group)] if topic.type is TopicType.DELAY else []
    return [queue_name(topic.name, group), *due]


def earlier_queues(topic: TopicSpec, group: str) -> list[str]:
    """Return the queues that earlier releases declared for a group, and that nothing uses now."""
    due = [] if topic.type is TopicType.DELAY else [due_queue_name(topic.name, group)]  # once for retries
    return [f"{queue_name(topic.name, group)}:dead", *due]


def all_group_queues(topic: str, group: str) -> list[str]:
    """Return all queues that a group may have of a topic, whatever its type, those of earlier releases included."""
    return [queue_name(topic, group), *(f"{queue_name(topic, group)}:{last}" for last in ("due", "given-up", "dead"))]


def delay_queues() -> list[str]:
    """Return the queues that a delayed message may pass before its destination."""
    return [*map(delay_queue, range(DELAY_QUEUES)), UNDELIVERABLE]


def delay_exchanges() -> list[str]:
    """Return the exchanges that a delayed message may pass before its destination."""
    return [*map(delay_queue, range(DELAY_QUEUES)), DUE, UNDELIVERABLE]


def declare_topic(channel: amqp.Channel, topic: TopicSpec) -> None:
    """
    Declare a topic's exchange.

    Raises:
        amqp.PreconditionFailed: there is one of that name with other arguments; its text names the difference.
    """
    channel.exchange_declare(topic.name, "topic", durable=True, auto_delete=False)


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """
    A queue of a group as it is declared.

    Args:
        bindings: exchange, routing key and arguments of each.
    """

    name: str
    arguments: Mapping[str, Any]
    bindings: Sequence[tuple[str, str, Mapping[str, str] | None]] = ()

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
        for exchange, routing_key, arguments in self.bindings:
            channel.queue_bind(self.name, exchange, routing_key=routing_key, arguments=arguments)


def queues_of_group(channel: amqp.Channel, topic: TopicSpec, group: str, *, max_length: int | None) -> Iterator[GroupQueue]:
    """Yield a group's queues, in the order in which they are declared: after the topic, and after the delay queues."""
    inlet = inlet_name(topic.name, group)
    yield GroupQueue(inlet, {**quorum(channel), "x-overflow": "reject-publish"})
    arguments: dict[str, Any] = {
        **quorum(channel),
        **AT_LEAST_ONCE,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": inlet,
        "x-message-ttl": int(topic.retention.total_seconds() * 1000),
    }
    if topic.type is TopicType.DELAY:
        yield GroupQueue(due_queue_name(topic.name, group), dict(arguments), [(DUE, "", _for(topic.name))])
    elif topic.type is TopicType.FIFO:
        arguments["x-single-active-consumer"] = True
    if max_length is not None:
        arguments["x-max-length"] = max_length
    yield GroupQueue(queue_name(topic.name, group), arguments, [(topic.name, "#", None)])


def declare_group(channel: amqp.Channel, topic: TopicSpec, group: str, *, max_length: int | None) -> None:
    """
    Declare a group's queues, and bind them to the topic and to the delay queues, which are declared already.

    Raises:
        amqp.PreconditionFailed: as for `declare_topic`.
    """
    for queue in queues_of_group(channel, topic, group, max_length=max_length):
        queue.declare_and_bind(channel)


def declare_delays(channel: amqp.Channel) -> None:
    """Declare and bind the queues and exchanges that delay messages."""
    declare_delay_queues(channel)
    channel.queue_bind(UNDELIVERABLE, UNDELIVERABLE)
    for number in range(DELAY_QUEUES):
        below = delay_queue(number - 1) if number else DUE
        before = "*." * (DELAY_QUEUES - 1 - number)
        channel.queue_bind(delay_queue(number), delay_queue(number), routing_key=f"{before}1.#")
        channel.exchange_bind(below, delay_queue(number), routing_key=f"{before}0.#")


def declare_delay_queues(channel: amqp.Channel) -> None:
    """Declare the queues and exchanges that delay messages, and bind none."""
    channel.exchange_declare(UNDELIVERABLE, "fanout", durable=True, auto_delete=False)
    channel.queue_declare(UNDELIVERABLE, durable=True, auto_delete=False, arguments=quorum(channel))
    otherwise = {"alternate-exchange": UNDELIVERABLE}
    channel.exchange_declare(DUE, "headers", durable=True, auto_delete=False, arguments=otherwise)
    for number in range(DELAY_QUEUES):
        below = delay_queue(number - 1) if number else DUE
        channel.exchange_declare(delay_queue(number), "topic", durable=True, auto_delete=False, arguments=otherwise)
        arguments = {**QUORUM, **AT_LEAST_ONCE, "x-message-ttl": 1000 << number, "x-dead-letter-exchange": below}
        channel.queue_declare(delay_queue(number), durable=True, auto_delete=False, arguments=arguments)


def state_of(channel: amqp.Channel, queue: str) -> tuple[int, int] | None:
    """Return how many messages of a queue can be delivered, and how many consumers it has; None: there is no such queue."""
    try:
        answer = channel.queue_declare(queue, passive=True)
    except NotFound:
        return None  # the channel was opened anew
    assert answer is not None, "it is waited for"
    return int(answer[1]), int(answer[2])


def quorum(channel: amqp.Channel) -> dict[str, Any]:
    """
    Return the arguments of a quorum queue that keeps a message however often it is delivered.

    A process that closes its connection is not the message's failure; consumers count failures and crashes themselves. RabbitMQ
    4.0 and later give a message up after 20 deliveries unless a queue says otherwise.
    """
    version = str(channel.connection.server_properties.get("version", ""))
    return {**QUORUM, "x-delivery-limit": -1} if int(version.partition(".")[0] or 0) >= 4 else dict(QUORUM)


def _for(destination: str) -> Mapping[str, str]:
    return {"x-match": "all", DESTINATION: destination}

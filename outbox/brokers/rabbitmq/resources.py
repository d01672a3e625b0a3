"""
The exchanges of topics and queues of groups, which `outbox_topics` lists and creates.

An existing exchange or queue is compared by declaring it again, which never changes it. The server refuses a declaration with
other arguments, and names the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from operator import methodcaller

import amqp
import msgspec
from amqp.exceptions import AccessRefused, ChannelError, NotFound

from outbox.brokers.base import ServerResource
from outbox.brokers.rabbitmq import topology
from outbox.brokers.rabbitmq.client import describe
from outbox.brokers.rabbitmq.options import RabbitMQOptions
from outbox.brokers.rabbitmq.permissions import Permissions
from outbox.errors import BrokerMisconfigured
from outbox.message import TopicSpec

ChannelCall = Callable[[amqp.Channel], object]


class RabbitMQResource(msgspec.Struct, frozen=True):
    """
    An exchange or queue that is needed.

    Args:
        look_up: raises NotFound if it is missing.
        declare: declares it without its bindings, which changes nothing if it exists.
    """

    kind: str
    name: str
    wanted: Mapping[str, str]
    look_up: ChannelCall
    declare: ChannelCall
    declare_and_bind: ChannelCall


class RabbitMQResources:
    """
    The exchanges and queues that topics and groups need.

    Args:
        admin_channel: yields a channel, for an action that its errors (BrokerUnavailable) name.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        admin_channel: Callable[[str], AbstractContextManager[amqp.Channel]],
        topics: Iterable[TopicSpec],
    ) -> None:
        self._options = options
        self._admin_channel = admin_channel
        self._topics = list(topics)
        self._permissions = Permissions(options.user, options.virtual_host, [topic.name for topic in self._topics])

    def find(self) -> list[ServerResource]:
        """Return the exchanges and queues that are needed, compared with those on the server. Raises BrokerUnavailable."""
        with self._admin_channel("list exchanges and queues") as channel:
            return [self._compared(channel, resource) for resource in self._needed(channel)]

    def _needed(self, channel: amqp.Channel) -> Iterator[RabbitMQResource]:
        for topic in self._topics:
            look_up = methodcaller("exchange_declare", topic.name, "topic", passive=True)  # of any type
            declare = partial(topology.declare_topic, topic=topic)
            yield RabbitMQResource("topic", topic.name, {"type": "topic"}, look_up, declare, declare)
        for topic in self._topics:
            for group in self._options.groups.get(topic.name, ()):
                for queue in topology.queues_of_group(channel, topic, group, max_length=self._options.max_length):
                    wanted = {name: str(value) for name, value in queue.arguments.items() if value != ""}
                    look_up = methodcaller("queue_declare", queue.name, passive=True)
                    yield RabbitMQResource("queue", queue.name, wanted, look_up, queue.declare, queue.declare_and_bind)

    def _compared(self, channel: amqp.Channel, needed: RabbitMQResource) -> ServerResource:
        resource = partial(ServerResource, needed.kind, needed.name, needed.wanted, partial(self._create, needed))
        try:
            needed.look_up(channel)
        except NotFound:
            return resource(is_there=False)
        except ChannelError as error:
            return resource(is_there=None, trouble=f"RabbitMQ could not look it up: {describe(error)}.")
        try:
            needed.declare(channel)
        except AccessRefused as error:
            return resource(is_there=True, trouble=self._refusal("It was not compared", error))
        except ChannelError as error:
            return resource(is_there=True, differences=(describe(error),))
        return resource(is_there=True)

    def _create(self, needed: RabbitMQResource) -> None:
        subject = f"{needed.kind} {needed.name!r}"
        with self._admin_channel(f"declare {subject}") as channel:
            try:
                needed.look_up(channel)
            except NotFound:
                self._declare(channel, needed, subject)
            except ChannelError as error:
                raise BrokerMisconfigured(f"RabbitMQ could not look {subject} up: {describe(error)}.") from error

    def _declare(self, channel: amqp.Channel, needed: RabbitMQResource, subject: str) -> None:
        try:
            needed.declare_and_bind(channel)
        except AccessRefused as error:
            raise BrokerMisconfigured(self._refusal(f"RabbitMQ did not declare {subject}", error)) from error
        except ChannelError as error:
            raise BrokerMisconfigured(f"RabbitMQ did not declare {subject}: {describe(error)}.") from error

    def _refusal(self, subject: str, error: AccessRefused) -> str:
        problem = self._permissions.problem(subject, error)
        return f"{problem.text} {problem.hint}"

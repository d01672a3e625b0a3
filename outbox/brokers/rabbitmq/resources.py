"""
The exchanges of topics and queues of groups, which `outbox_topics` lists and creates.

An existing exchange or queue is compared by declaring it again, which never changes it. The server refuses a declaration with
other arguments, and names the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from operator import methodcaller

import amqp
from amqp.exceptions import AccessRefused, ChannelError, NotFound

from outbox.brokers.base import ServerResource
from outbox.brokers.rabbitmq import topology
from outbox.brokers.rabbitmq.client import describe
from outbox.brokers.rabbitmq.options import RabbitMQOptions
from outbox.brokers.rabbitmq.permissions import Permissions
from outbox.errors import BrokerMisconfigured
from outbox.message import TopicSpec

ChannelCall = Callable[[amqp.Channel], object]


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
            return list(self._find(channel))

    def _find(self, channel: amqp.Channel) -> Iterator[ServerResource]:
        for topic in self._topics:
            look_up = methodcaller("exchange_declare", topic.name, "topic", passive=True)  # finds an exchange of any type
            declare = partial(topology.declare_topic, topic=topic)
            create = partial(self._create, f"topic {topic.name!r}", look_up, declare)
            resource = partial(ServerResource, "topic", topic.name, {"type": "topic"}, create)
            yield self._compared(channel, resource, look_up, declare)
        for topic in self._topics:
            for group in self._options.groups.get(topic.name, ()):
                for queue in topology.queues_of_group(channel, topic, group, max_length=self._options.max_length):
                    wanted = {name: str(value) for name, value in queue.arguments.items() if value != ""}
                    look_up = methodcaller("queue_declare", queue.name, passive=True)
                    create = partial(self._create, f"queue {queue.name!r}", look_up, queue.declare_and_bind)
                    resource = partial(ServerResource, "queue", queue.name, wanted, create)
                    yield self._compared(channel, resource, look_up, queue.declare)

    def _compared(
        self, channel: amqp.Channel, resource: Callable[..., ServerResource], look_up: ChannelCall, declare: ChannelCall
    ) -> ServerResource:
        """
        Return a resource, compared with the server.

        Args:
            look_up: raises NotFound if the resource is missing.
            declare: declares the resource without its bindings, which changes nothing if it exists.
        """
        try:
            look_up(channel)
        except NotFound:
            return resource(exists=False)
        except ChannelError as error:
            return resource(exists=None, trouble=f"RabbitMQ could not look it up: {describe(error)}.")
        try:
            declare(channel)
        except AccessRefused as error:
            return resource(exists=True, trouble=self._refusal("It was not compared", error))
        except ChannelError as error:
            return resource(exists=True, differences=(describe(error),))
        return resource(exists=True)

    def _create(self, subject: str, look_up: ChannelCall, declare: ChannelCall) -> None:
        with self._admin_channel(f"declare {subject}") as channel:
            try:
                look_up(channel)
            except NotFound:
                self._declare(channel, declare, subject)
            except ChannelError as error:
                raise BrokerMisconfigured(f"RabbitMQ could not look {subject} up: {describe(error)}.") from error

    def _declare(self, channel: amqp.Channel, declare: ChannelCall, subject: str) -> None:
        try:
            declare(channel)
        except AccessRefused as error:
            raise BrokerMisconfigured(self._refusal(f"RabbitMQ did not declare {subject}", error)) from error
        except ChannelError as error:
            raise BrokerMisconfigured(f"RabbitMQ did not declare {subject}: {describe(error)}.") from error

    def _refusal(self, subject: str, error: AccessRefused) -> str:
        problem = self._permissions.problem(subject, error)
        return f"{problem.text} {problem.hint}"

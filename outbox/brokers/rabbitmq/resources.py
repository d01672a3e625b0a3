"""
What `outbox_topics` lists and creates: exchanges of topics and the queues of groups.

What exists is declared again as it should be, which changes nothing: the server refuses another form, and names the difference.
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

Ask = Callable[[amqp.Channel], object]


class RabbitMQResources:
    """
    The exchanges and queues that topics and groups need.

    Args:
        asking: yields a channel for what is asked, whose errors are BrokerUnavailable.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        asking: Callable[[str], AbstractContextManager[amqp.Channel]],
        topics: Iterable[TopicSpec],
    ) -> None:
        self._options = options
        self._asking = asking
        self._topics = list(topics)
        self._permissions = Permissions(options.user, options.virtual_host, [topic.name for topic in self._topics])

    def find(self) -> list[ServerResource]:
        """Return what is needed, and what is there. Raises BrokerUnavailable."""
        with self._asking("list what is declared") as channel:
            return list(self._find(channel))

    def _find(self, channel: amqp.Channel) -> Iterator[ServerResource]:
        for topic in self._topics:
            look_up = methodcaller("exchange_declare", topic.name, "topic", passive=True)  # of any type
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
        self, channel: amqp.Channel, resource: Callable[..., ServerResource], look_up: Ask, declare: Ask
    ) -> ServerResource:
        """
        Return a resource with what is there.

        Args:
            look_up: raises NotFound if it is missing.
            declare: declares it without its bindings, which changes nothing where it is there.
        """
        try:
            look_up(channel)
        except NotFound:
            return resource(is_there=False)
        except ChannelError as error:
            return resource(is_there=None, trouble=f"RabbitMQ does not tell: {describe(error)}.")
        try:
            declare(channel)
        except AccessRefused as error:
            return resource(is_there=True, trouble=self._refusal("It was not compared", error))
        except ChannelError as error:
            return resource(is_there=True, differences=(describe(error),))
        return resource(is_there=True)

    def _create(self, what: str, look_up: Ask, declare: Ask) -> None:
        with self._asking(f"declare {what}") as channel:
            try:
                look_up(channel)
            except NotFound:
                self._declare(channel, declare, what)
            except ChannelError as error:
                raise BrokerMisconfigured(f"RabbitMQ does not tell of {what}: {describe(error)}.") from error

    def _declare(self, channel: amqp.Channel, declare: Ask, what: str) -> None:
        try:
            declare(channel)
        except AccessRefused as error:
            raise BrokerMisconfigured(self._refusal(f"RabbitMQ did not declare {what}", error)) from error
        except ChannelError as error:
            raise BrokerMisconfigured(f"RabbitMQ did not declare {what}: {describe(error)}.") from error

    def _refusal(self, what: str, error: AccessRefused) -> str:
        problem = self._permissions.problem(what, error)
        return f"{problem.text} {problem.hint}"

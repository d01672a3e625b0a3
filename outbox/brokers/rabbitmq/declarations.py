"""Declares what topics and their consumer groups need on the server."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import amqp
from amqp.exceptions import NotFound

from outbox.brokers.rabbitmq import topology
from outbox.message import TopicSpec, TopicType


class Declarations:
    """
    Declares for all connections of a broker: the delay queues the first time, all others each time.

    Args:
        topics: by name.
        max_length: the maximum number of messages in the queue of a group, without those whose delay is over.
    """

    def __init__(self, topics: Mapping[str, TopicSpec], max_length: int | None) -> None:
        self._topics = topics
        self._max_length = max_length
        self._has_delays = False
        self.has_new = False  # something was declared since this was set to False

    def declare(self, channel: amqp.Channel, topic: str, groups: Collection[str]) -> None:
        """
        Declare a topic and the queues of groups. The channel can be used afterwards, even after an error.

        Raises:
            amqp.ChannelError: the server has them with other arguments, or refuses.
        """
        try:
            self._declare(channel, topic, groups)
        except NotFound:  # delay queues were deleted
            self.forget()
            self._declare(channel, topic, groups)
        self.has_new = True

    def declare_queues(self, channel: amqp.Channel, topic: TopicSpec, group: str) -> None:
        """Declare the queues of one group; otherwise as `declare`."""
        topology.declare_group(channel, topic, group, max_length=self._max_length)

    def forget(self) -> None:
        """Declare the delay queues again next time: one of them is missing."""
        self._has_delays = False

    def _declare(self, channel: amqp.Channel, topic: str, groups: Collection[str]) -> None:
        spec = self._topics[topic]
        if spec.type is TopicType.DELAY and not self._has_delays:
            topology.declare_delays(channel)
            self._has_delays = True
        topology.declare_topic(channel, spec)
        for group in groups:
            self.declare_queues(channel, spec, group)

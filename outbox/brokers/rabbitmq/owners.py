"""
The owner of a consumer group: stored on the server by the first receive, so that two projects do not share a group's queue.

The note is an exchange with the name of the group's queue, through which no message goes. Its argument `alternate-exchange` is
the id of the outbox with the group's inbox; the server refuses a declaration with another one. The id alone decides: a project's
name may change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import amqp
from amqp.exceptions import NotFound, PreconditionFailed

from outbox.brokers.owners import GroupOwner, GroupOwners, OwnedByAnother
from outbox.brokers.rabbitmq.topology import OWNER, queue_name

CURRENT = re.compile(rf"but current is the value '{re.escape(OWNER)}([0-9a-f-]{{36}})")


class RabbitMQOwners(GroupOwners):
    """The owners of groups, and their notes on the server."""

    def claim(self, channel: amqp.Channel, topic: str, group: str) -> None:
        """
        Declare that the group of a topic is ours, if that is known here. The channel can be used afterwards, even after an error.

        Raises:
            OwnedByAnother: it is not.
            amqp.ChannelError: the server refuses for another reason.
        """
        if group not in self._of:
            return
        name, ours = queue_name(topic, group), self._of[group]
        try:
            _declare(channel, name, {"alternate-exchange": f"{OWNER}{ours.source}"})
        except PreconditionFailed as error:
            if "'alternate-exchange'" not in str(error.reply_text):
                raise
            theirs = GroupOwner(_read_source(channel, name), project="")
            raise OwnedByAnother(f"Queue {name!r}", group, theirs, ours, apart="a virtual host of its own") from error

    def require(self, channel: amqp.Channel, topics: Iterable[str], group: str) -> None:
        """Raise OwnedByAnother if the group of a topic is not ours. Declares nothing."""
        for topic in topics:
            if _is_noted(channel, topic, group):
                self.claim(channel, topic, group)

    def take_over(self, channel: amqp.Channel, topics: Iterable[str], group: str) -> None:
        """Replace the notes by ours. Raises OwnedByAnother if another one's client declares its own in between."""
        for topic in topics:
            if _is_noted(channel, topic, group):
                channel.exchange_delete(queue_name(topic, group))
                self.claim(channel, topic, group)


def _is_noted(channel: amqp.Channel, topic: str, group: str) -> bool:
    """Return whether the group of a topic has an owner: it has none before its first receive."""
    try:
        channel.exchange_declare(queue_name(topic, group), "fanout", passive=True)
    except NotFound:
        return False
    return True


def _declare(channel: amqp.Channel, name: str, arguments: dict[str, str]) -> None:
    channel.exchange_declare(name, "fanout", durable=True, auto_delete=False, arguments=arguments)


def _read_source(channel: amqp.Channel, name: str) -> str:
    """Return the id that the server has noted; "" where long names cut its answer, of 255 bytes, before the id."""
    try:
        _declare(channel, name, {})  # without our id, theirs is in the answer
    except PreconditionFailed as error:
        match = CURRENT.search(str(error.reply_text))
        return match[1] if match else ""
    channel.exchange_delete(name)  # it was deleted meanwhile, and this has declared one without an owner
    return ""

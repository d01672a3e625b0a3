"""
The owner of a consumer group, which is stored on the server by the first receive, so that two projects do not share a queue.

It is stored as an exchange that has the name of the group's queue, and through which no message is routed. Its argument
`alternate-exchange` contains the id of the outbox with the group's inbox. The server refuses a declaration with another id. The
project's name is not part of it, because the name may change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import amqp
from amqp.exceptions import NotFound, PreconditionFailed

from outbox.brokers.owners import GroupOwner, GroupOwners, OwnedByAnother
from outbox.brokers.rabbitmq.topology import OWNER, queue_name

STORED_OWNER = re.compile(rf"but current is the value '{re.escape(OWNER)}([0-9a-f-]{{36}})")


class RabbitMQOwners(GroupOwners):
    """The owners of groups, here and on the server."""

    def claim(self, channel: amqp.Channel, topic: str, group: str) -> None:
        """
        Store this outbox as the owner of a topic's group, if the owner is set here. The channel stays usable even after an error.

        Raises:
            OwnedByAnother: the group has another owner.
            amqp.ChannelError: the server refuses the declaration for another reason.
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
            raise OwnedByAnother(f"Queue {name!r}", group, theirs, ours, separation="a virtual host of its own") from error

    def require(self, channel: amqp.Channel, topics: Iterable[str], group: str) -> None:
        """Raise OwnedByAnother if another outbox owns the group of a topic. Nothing new is declared."""
        for topic in topics:
            if _has_owner(channel, topic, group):
                self.claim(channel, topic, group)

    def take_over(self, channel: amqp.Channel, topics: Iterable[str], group: str) -> None:
        """Replace the stored owners with this outbox. Raises OwnedByAnother if a client of another one stores it in between."""
        for topic in topics:
            if _has_owner(channel, topic, group):
                channel.exchange_delete(queue_name(topic, group))
                self.claim(channel, topic, group)


def _has_owner(channel: amqp.Channel, topic: str, group: str) -> bool:
    """Return whether the group of a topic has an owner on the server, which it has since its first receive."""
    try:
        channel.exchange_declare(queue_name(topic, group), "fanout", passive=True)
    except NotFound:
        return False
    return True


def _declare(channel: amqp.Channel, name: str, arguments: dict[str, str]) -> None:
    channel.exchange_declare(name, "fanout", durable=True, auto_delete=False, arguments=arguments)


def _read_source(channel: amqp.Channel, name: str) -> str:
    """Return the owner's id on the server; "" if the server's answer, which is cut at 255 bytes, does not contain the id."""
    try:
        _declare(channel, name, {})  # refused, with the stored id in the text of the error
    except PreconditionFailed as error:
        match = STORED_OWNER.search(str(error.reply_text))
        return match[1] if match else ""
    channel.exchange_delete(name)  # the owner was deleted meanwhile, so the call above has declared an exchange without one
    return ""

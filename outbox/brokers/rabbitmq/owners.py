"""
Whose a consumer group is: noted on the server with the first receive, so that two projects do not share a group's queue.

The note is an exchange with the name of the group's queue, through which no message goes. Its argument `alternate-exchange` names
the outbox with the group's inbox; the server refuses a declaration with another one, and says which one it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import amqp
from amqp.exceptions import NotFound, PreconditionFailed

from outbox.brokers.rabbitmq.topology import OWNER, queue_name

URN = "urn:uuid:"
CURRENT = re.compile(rf"but current is the value '{re.escape(OWNER)}([^.']+)\.?([^']*)")


class OwnedByAnother(Exception):
    """Raised when the group of a topic belongs to another outbox. Its arguments: what is wrong, and what to do."""

    def __str__(self) -> str:
        return " ".join(self.args)


class Owners:
    """The outboxes with the inboxes of this client's groups."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str]] = {}  # group -> source and project

    def set(self, group: str, source: str, project: str) -> None:
        """Note in which outbox a group has its inbox."""
        self._of[group] = source.removeprefix(URN), project

    def groups(self) -> list[str]:
        """Return the groups whose outbox is known."""
        return sorted(self._of)

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
            _declare(channel, name, {"alternate-exchange": f"{OWNER}{'.'.join(ours)}"})
        except PreconditionFailed as error:
            if "'alternate-exchange'" not in str(error.reply_text):
                raise
            source, project = _read(channel, name)
            if source != ours[0]:
                raise OwnedByAnother(*_explain(name, group, (source, project), ours)) from error

    def require(self, channel: amqp.Channel, topics: Iterable[str], group: str) -> None:
        """Raise OwnedByAnother if the group of a topic is not ours. Declares nothing."""
        for topic in topics:
            try:
                channel.exchange_declare(queue_name(topic, group), "fanout", passive=True)
            except NotFound:  # it never received
                continue
            self.claim(channel, topic, group)

    def forget(self, channel: amqp.Channel, topics: Iterable[str], group: str) -> None:
        """Remove the notes: the next one that receives for the group owns it."""
        for topic in topics:
            channel.exchange_delete(queue_name(topic, group))


def _declare(channel: amqp.Channel, name: str, arguments: dict[str, str]) -> None:
    channel.exchange_declare(name, "fanout", durable=True, auto_delete=False, arguments=arguments)


def _read(channel: amqp.Channel, name: str) -> tuple[str, str]:
    """Return source and project of the owner that the server has noted; empty where it cannot be read."""
    try:
        _declare(channel, name, {})  # the server's answer is cut after 255 bytes: without our name, theirs is in it
    except PreconditionFailed as error:
        if found := CURRENT.search(str(error.reply_text)):
            return found[1], found[2]
    return "", ""


def _explain(queue: str, group: str, theirs: tuple[str, str], ours: tuple[str, str]) -> tuple[str, str]:
    return (
        f"Queue {queue!r} belongs to the project {theirs[1]!r} (outbox {URN}{theirs[0]}), and this is {ours[1]!r} "
        f"(outbox {URN}{ours[0]}): a consumer group has its inbox in one database.",
        "Give this group another name, or each project a virtual host. If the other database is gone for good, run "
        f"outbox_consume --group {group} --take-over once.",
    )

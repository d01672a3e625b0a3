"""What the code and the settings say: topics, with the types that are published to them and the handlers that take them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from outbox import conf
from outbox.catalogue.examples import example
from outbox.consuming.register import Consumer, groups
from outbox.errors import ConfigurationError, UnknownTopic
from outbox.message import Message, message_types, prepare
from outbox.monitoring.promises import Promise, promise_of
from outbox.monitoring.text import age


@dataclass(frozen=True, slots=True)
class HandlerEntry:
    """
    A handler of a consumer group.

    Args:
        name: module and qualified name of the function.
        takes: the name of the type that it handles; "" for the messages of its topic that have no other handler in the group.
        retry: how often and when it is tried again, in words.
        tags: the only tags that it takes; empty: all.
        using: the database of its writes and of the group's inbox.
    """

    group: str
    name: str
    takes: str
    retry: str
    tags: list[str]
    using: str


@dataclass(frozen=True, slots=True)
class TypeEntry:
    """
    A message type.

    Args:
        name: on the wire.
        location: module and qualified name of its class.
        description: its docstring.
        version: the current version of its body.
        upgrades: the older versions whose bodies can still be read.
        key, tag: as in its `class Meta`.
        schema: the JSON Schema of its body.
        example: a body; None where the type's constraints do not tell one.
    """

    name: str
    location: str
    description: str
    version: int
    upgrades: list[int]
    key: str
    tag: str
    schema: dict[str, Any]
    example: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class TopicEntry:
    """
    A topic in the settings, or one that only types or handlers name.

    Args:
        broker: the alias of its broker; "" where the settings do not have the topic.
        type: of the topic; "" as above.
        promise: what is promised about its messages; None as above, or where the broker's client is not installed.
    """

    name: str
    broker: str
    type: str
    promise: Promise | None
    types: list[TypeEntry]
    handlers: list[HandlerEntry]

    def handlers_of(self, name: str) -> list[HandlerEntry]:
        """Return the handlers that get messages of a type: those of the type, and of other groups those of the topic."""
        found = {one.group: one for one in self.handlers if not one.takes}
        return list((found | {one.group: one for one in self.handlers if one.takes == name}).values())


def read_entries() -> list[TopicEntry]:
    """
    Return all topics, by name.

    Raises:
        InvalidMessageType: the annotations of a type cannot be read.
    """
    types = message_types().values()
    handlers = [one for group in groups().values() for one in group.consumers.values()]
    names = {*conf.settings().topics, *(kind._meta.topic for kind in types), *(one.topic for one in handlers)}
    return [
        _topic(
            name,
            [_type(kind) for kind in types if kind._meta.topic == name],
            [_handler(one) for one in handlers if one.topic == name],
        )
        for name in sorted(names)
    ]


def _topic(name: str, types: Sequence[TypeEntry], handlers: Sequence[HandlerEntry]) -> TopicEntry:
    broker = type_ = ""
    promise = None
    with suppress(UnknownTopic):
        found = conf.topic_settings(name)
        broker, type_ = found.broker, str(found.type or "")
        with suppress(ConfigurationError):  # check E003 reports it
            promise = promise_of(name)
    by_name = sorted(handlers, key=lambda one: (one.group, one.takes))
    return TopicEntry(name, broker, type_, promise, sorted(types, key=lambda one: one.name), by_name)


def _type(kind: type[Message]) -> TypeEntry:
    prepare(kind)
    meta = kind._meta
    return TypeEntry(
        meta.type,
        f"{kind.__module__}.{kind.__qualname__}",
        inspect.cleandoc(kind.__doc__ or ""),
        meta.version,
        sorted(kind._upgrades),
        meta.key,
        meta.tag,
        msgspec.json.schema(kind),
        example(kind),
    )


def _handler(one: Consumer) -> HandlerEntry:
    takes = one.type._meta.type if one.type else ""
    return HandlerEntry(one.group, one.name, takes, _retry_in_words(one), sorted(one.tags or ()), one.using)


def _retry_in_words(one: Consumer) -> str:
    retry = one.retry
    if retry.limit == 0:
        return "never tried again"
    ends = retry.delays[0], retry.delays[min(retry.limit, len(retry.delays)) - 1]
    first, last = (age(delay.total_seconds()) for delay in ends)
    times = "once more" if retry.limit == 1 else f"{retry.limit} times more"
    after = f"after {first}" if first == last else f"after {first} to {last}"
    then = "then blocks its key" if one.ordered and one.on_dead == "block" else "then a dead letter"
    return f"{times}, {after}, {then}"

"""The content of code and settings: topics, with the types that are published to them and the handlers that take them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from outbox import conf
from outbox.catalogue.examples import example
from outbox.consuming.register import Consumer, all_consumers
from outbox.errors import ConfigurationError, InvalidMessageType
from outbox.message import Message, message_types
from outbox.monitoring.promises import Promise, promise_of
from outbox.monitoring.text import age
from outbox.schema.json_schema import schema_of


class HandlerEntry(msgspec.Struct, frozen=True):
    """
    A handler of a consumer group.

    Args:
        name: module and qualified name of the function.
        takes: the name of the type that it handles; "" for the messages of its topic that have no other handler in the group.
        retry: how often and when a message is retried, in words.
        tags: the only tags that it takes; empty: all.
        using: the database of its writes and of the group's inbox.
    """

    group: str
    name: str
    takes: str
    retry: str
    tags: list[str]
    using: str


class TypeEntry(msgspec.Struct, frozen=True):
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
        trouble: why its body cannot be described; "": it can.
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
    trouble: str = ""


class TopicEntry(msgspec.Struct, frozen=True):
    """
    A topic in the settings, or one that only types or handlers name.

    Args:
        broker: the alias of its broker; "" where the settings do not have the topic.
        type: of the topic; "" as above, or where the settings leave it to a broker whose client is not installed.
        promise: the promise about its messages; None where the type is "", or the broker's client is not installed.
    """

    name: str
    broker: str
    type: str
    promise: Promise | None
    types: list[TypeEntry]
    handlers: list[HandlerEntry]

    def handlers_of(self, name: str) -> list[HandlerEntry]:
        """
        Return the handlers that get messages of a type: those of the type, and of other groups those of the topic.

        A group whose handler of the type has tags gets the others by that of the topic.
        """
        taken = {handler.group for handler in self.handlers if handler.takes == name and not handler.tags}
        return [
            handler for handler in self.handlers if handler.takes == name or (not handler.takes and handler.group not in taken)
        ]


def read_entries() -> list[TopicEntry]:
    """Return all topics, by name."""
    types = message_types().values()
    handlers = all_consumers()
    named = {kind._meta.topic for kind in types if kind._meta.topic}  # a type without a topic is not published
    names = {*conf.settings().topics, *named, *(handler.topic for handler in handlers)}
    return [
        _topic(
            name,
            [_type(kind) for kind in types if kind._meta.topic == name],
            [_handler(handler) for handler in handlers if handler.topic == name],
        )
        for name in sorted(names)
    ]


def _topic(name: str, types: Sequence[TypeEntry], handlers: Sequence[HandlerEntry]) -> TopicEntry:
    broker = type_ = ""
    promise = None
    if settings := conf.settings().topics.get(name):
        broker, type_ = settings.broker, str(settings.type or "")
        with suppress(ConfigurationError):  # check E003 reports it
            type_, promise = str(conf.topic_settings(name).type), promise_of(name)
    by_name = sorted(handlers, key=lambda handler: (handler.group, handler.takes))
    return TopicEntry(name, broker, type_, promise, sorted(types, key=lambda kind: kind.name), by_name)


def _type(kind: type[Message]) -> TypeEntry:
    meta, schema, made, trouble = kind._meta, {}, None, ""
    try:
        schema, made = schema_of(kind), example(kind)
    except InvalidMessageType as error:  # check E047 reports it; the other types are shown all the same
        trouble = str(error)
    return TypeEntry(
        meta.type,
        f"{kind.__module__}.{kind.__qualname__}",
        inspect.cleandoc(kind.__doc__ or ""),
        meta.version,
        sorted(kind._upgrades),
        meta.key,
        meta.tag,
        schema,
        made,
        trouble,
    )


def _handler(one: Consumer) -> HandlerEntry:
    takes = one.type._meta.type if one.type else ""
    return HandlerEntry(one.group, one.name, takes, _retry_in_words(one), sorted(one.tags or ()), one.using)


def _retry_in_words(one: Consumer) -> str:
    retry = one.retry
    if retry.limit == 0:
        return "no retry"
    ends = retry.delays[0], retry.delays[min(retry.limit, len(retry.delays)) - 1]
    first, last = (age(delay.total_seconds()) for delay in ends)
    times = "1 retry" if retry.limit == 1 else f"{retry.limit} retries"
    after = f"after {first}" if first == last else f"after {first} to {last}"
    then = "then blocks its key" if one.is_ordered and one.on_dead == "block" else "then a dead letter"
    return f"{times}, {after}, {then}"

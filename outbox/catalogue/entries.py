"""The entries of the catalogue: topics, with the message types that are published to them and their handlers."""

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
        tags: the only tags that it handles; empty for all messages.
        using: the database that it writes to, which has the group's inbox.
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
        name: the type's name on the wire.
        location: module and qualified name of its class.
        description: its docstring.
        version: the current version of its body.
        upgrades: the older versions whose bodies can still be read.
        key, tag: the options in its `class Meta`.
        schema: the JSON Schema of its body.
        example: an example of a body; None if none could be made that fits the type's constraints.
        trouble: why its body cannot be described by a schema; "" if it can.
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
    A topic in the settings, or one that only message types or handlers name.

    Args:
        broker: the alias of the topic's broker; "" if the settings do not have the topic.
        type: the topic's type; "" if the settings do not have the topic, or if the type depends on a broker whose client is not
            installed.
        promise: the guarantees for the topic's messages; None if the type is "", or the broker's client is not installed.
    """

    name: str
    broker: str
    type: str
    promise: Promise | None
    types: list[TypeEntry]
    handlers: list[HandlerEntry]

    def handlers_of(self, name: str) -> list[HandlerEntry]:
        """
        Return the handlers that get messages of a type.

        These are the handlers of the type; and in groups without one, or whose handler of the type is only for some tags, the
        handler of the topic.
        """
        complete = {handler.group for handler in self.handlers if handler.takes == name and not handler.tags}
        return [
            handler for handler in self.handlers if handler.takes == name or (not handler.takes and handler.group not in complete)
        ]


def read_entries() -> list[TopicEntry]:
    """Return all topics, sorted by name."""
    types = message_types().values()
    handlers = all_consumers()
    published = {kind._meta.topic for kind in types if kind._meta.topic}  # a type without a topic is not published
    names = {*conf.settings().topics, *published, *(handler.topic for handler in handlers)}
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
    meta, schema, body, trouble = kind._meta, {}, None, ""
    try:
        schema, body = schema_of(kind), example(kind)
    except InvalidMessageType as error:  # check E047 reports it; the catalogue still shows the other types
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
        body,
        trouble,
    )


def _handler(consumer: Consumer) -> HandlerEntry:
    takes = consumer.type._meta.type if consumer.type else ""
    return HandlerEntry(
        consumer.group, consumer.name, takes, _retry_in_words(consumer), sorted(consumer.tags or ()), consumer.using
    )


def _retry_in_words(consumer: Consumer) -> str:
    retry = consumer.retry
    if retry.limit == 0:
        return "no retry"
    bounds = retry.delays[0], retry.delays[min(retry.limit, len(retry.delays)) - 1]
    first, last = (age(delay.total_seconds()) for delay in bounds)
    times = "1 retry" if retry.limit == 1 else f"{retry.limit} retries"
    after = f"after {first}" if first == last else f"after {first} to {last}"
    then = "then blocks its key" if consumer.is_ordered and consumer.on_dead == "block" else "then a dead letter"
    return f"{times}, {after}, {then}"

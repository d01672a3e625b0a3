"""Message types: where they go, what their Meta names, how older bodies are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec.inspect
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution

from outbox import conf
from outbox.errors import ConfigurationError, UnknownTopic
from outbox.half_first import topic_problem
from outbox.message import Message, TopicType, message_types
from outbox.publishing.build import built_types

PLAIN = (str, int, float, bool, list, dict, type(None))
"""What JSON is read as."""


def check_topics(**kwargs: Any) -> list[CheckMessage]:
    """
    E005: A message type names no topic, and is no base of others.

    Add `class Meta: topic = "..."` to it.

    E006: A message type's topic is not in `OUTBOX["TOPICS"]`.

    Add the topic, or correct the name; the text says which is near.
    """
    return [problem for kind in message_types().values() for problem in _problems_of_topic(kind)]


def check_keys(**kwargs: Any) -> list[CheckMessage]:
    """
    E013: `Meta.key` or `Meta.mask` of a message type names no field of it.

    Name a field; for the key a property of the class does as well. What `mask` does not name is shown to everybody who may see
    messages.

    W014: A message type names no key, and its topic is of type fifo.

    Order is kept per key. Name one in Meta, unless every call says `publish(..., key=...)`.
    """
    return [problem for kind in message_types().values() for problem in _problems_of_key(kind)]


def check_fields(**kwargs: Any) -> list[CheckMessage]:
    """
    E047: A field of a message type is annotated with what JSON cannot hold.

    Nothing of it could be published. Put what others need into fields of plain types: a primary key, a text, a number, a list, a
    dict, another message type or dataclass.
    """
    return [problem for kind in message_types().values() for problem in _problems_of_fields(kind)]


def check_upgrades(**kwargs: Any) -> list[CheckMessage]:
    """
    E015: A message type has upgrades that cannot lead to its version.

    A body is upgraded a step at a time: from the oldest version up to the one before `Meta.version`, each has its step.
    """
    found: list[CheckMessage] = []
    for kind in message_types().values():
        steps, version = kind._upgrades, kind._meta.version
        for step in sorted(step for step in steps if step >= version):
            text = f"Message type {_name(kind)} is at version {version} and has an upgrade from version {step}."
            found.append(Error(text, hint=f"Raise Meta.version to {step + 1}, or take the upgrade out.", id="outbox.E015"))
        for step in sorted(set(range(min(steps, default=version), version)) - set(steps)):
            text = f"Message type {_name(kind)} upgrades from version {min(steps)}, but not from version {step}."
            found.append(Error(text, hint=f"Add @{kind.__name__}.upgrade_from({step}).", id="outbox.E015"))
    return found


def check_half_first(**kwargs: Any) -> list[CheckMessage]:
    """
    E035: What a function builds to go half first goes to a topic without half messages.

    Make the topic of type transaction, on a broker with half messages, or publish in the transaction. Only annotated functions
    are looked at; of others the first call says so.
    """
    return [problem for name, kind in built_types() for problem in _problems_of_half_first(name, kind)]


def _problems_of_topic(kind: type[Message]) -> Iterator[CheckMessage]:
    if not kind._meta.topic:
        if not kind.__subclasses__():
            hint = 'Add `class Meta: topic = "..."` to it.'
            yield Error(f"Message type {_name(kind)} names no topic: it cannot be published.", hint=hint, id="outbox.E005")
        return
    try:
        conf.topic_settings(kind._meta.topic)
    except UnknownTopic as error:
        text, _, hint = str(error).partition(". ")
        yield Error(f"Message type {_name(kind)}: {text}.", hint=hint, id="outbox.E006")
    except ConfigurationError:  # E001 or E003 has said it
        return


def _problems_of_key(kind: type[Message]) -> Iterator[CheckMessage]:
    key, topic = kind._meta.key, kind._meta.topic
    if key and not hasattr(kind, key):
        fields = ", ".join(kind.__struct_fields__) or "none"
        yield Error(
            f"Message type {_name(kind)} has Meta.key = {key!r}, which is no field of it.",
            hint=f"Its fields are {fields}.",
            id="outbox.E013",
        )
    for name in kind._meta.mask:
        if name not in kind.__struct_fields__:
            yield Error(
                f"Message type {_name(kind)} masks {name!r}, which is no field of it, so nothing is hidden by that.",
                hint=f"Its fields are {', '.join(kind.__struct_fields__) or 'none'}.",
                id="outbox.E013",
            )
    if not key and topic and _type_of(topic) is TopicType.FIFO:
        yield Caution(
            f"Message type {_name(kind)} names no key, and its topic {topic!r} is of type fifo, which keeps order per key.",
            hint='Add `key = "..."` to its class Meta. Where each publish() is given key=, silence this check.',
            id="outbox.W014",
        )


def _problems_of_fields(kind: type[Message]) -> Iterator[CheckMessage]:
    hint = "Write a plain type there, such as int, str, Decimal, datetime, a list or a dict of them, or a dataclass."
    try:
        fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    except Exception as error:  # TypeError, NameError: what msgspec says of annotations
        yield Error(f"Message type {_name(kind)} has annotations that cannot be read: {error}", hint=hint, id="outbox.E047")
        return
    for field in fields:
        for cls in _foreign_types(field.type, set()):
            text = f"Message type {_name(kind)} has the field {field.name!r} of type {cls.__module__}.{cls.__qualname__}"
            yield Error(f"{text}, which JSON cannot hold.", hint=hint, id="outbox.E047")


def _foreign_types(node: object, seen: set[type]) -> Iterator[type]:
    """Return the types within an annotation of which no value comes out of JSON."""
    if isinstance(node, msgspec.inspect.CustomType):
        if not any(issubclass(plain, node.cls) for plain in PLAIN):
            yield node.cls
        return
    kind = getattr(node, "cls", None)
    if isinstance(kind, type):
        if kind in seen:
            return
        seen.add(kind)
    inner = [getattr(node, name, None) for name in ("type", "item_type", "key_type", "value_type")]
    for one in (*inner, *getattr(node, "types", ()), *getattr(node, "item_types", ()), *getattr(node, "fields", ())):
        if isinstance(one, msgspec.inspect.Type | msgspec.inspect.Field):
            yield from _foreign_types(one, seen)


def _problems_of_half_first(name: str, kind: type[Message]) -> Iterator[CheckMessage]:
    try:
        problem = topic_problem(kind._meta.topic) if kind._meta.topic else None
    except (UnknownTopic, ConfigurationError):  # E001, E003 or E006 has said it
        return
    if problem:
        text, _, hint = problem.partition(". ")
        text = f"{name} builds {kind.__name__} to go half first, and {text}."
        yield Error(text, hint=f"{hint}, or publish() the message in the transaction.", id="outbox.E035")


def _type_of(topic: str) -> TopicType | None:
    try:
        return conf.topic_settings(topic).type
    except (UnknownTopic, ConfigurationError):
        return None


def _name(kind: type[Message]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

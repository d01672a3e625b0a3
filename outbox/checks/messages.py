"""Check message types: topics, Meta, fields and upgrades."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

import msgspec.inspect
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution

from outbox import conf
from outbox.checks.decorators import check
from outbox.errors import ConfigurationError, UnknownTopic
from outbox.half_first import topic_problem
from outbox.half_first.build import built_types
from outbox.message import Message, TopicType, message_types
from outbox.schema.json_schema import values_of_enum

PLAIN = (str, int, float, bool, list, dict, type(None))
"""The types of values decoded from JSON."""


@check()
def check_topics() -> Iterable[CheckMessage]:
    """
    E005: A message type has no topic.

    Add `class Meta: topic = "..."` to it, or `abstract = True` if it is only the base of other types.

    E006: A message type's topic is not in `OUTBOX["TOPICS"]`.

    Add the topic, or correct its name; the error names the most similar topic.
    """
    for kind in message_types().values():
        if not kind._meta.topic:
            hint = 'Add `class Meta: topic = "..."` to it, or `abstract = True` if it is only the base of other types.'
            yield Error(f"Message type {_name(kind)} has no topic, so it cannot be published.", hint=hint, id="outbox.E005")
            continue
        try:
            conf.topic_settings(kind._meta.topic)
        except UnknownTopic as error:
            yield Error(f"Message type {_name(kind)}: {error.message}", hint=error.hint, id="outbox.E006")
        except ConfigurationError:  # E001 or E003 reports it
            continue


@check()
def check_keys() -> Iterable[CheckMessage]:
    """
    E013: `Meta.key` or `Meta.mask` of a message type does not name a field of the type.

    Name a field; the key may also be a property of the class. Fields that `mask` does not name are shown to all users who have
    the permission to view messages.

    W014: A message type has no key, and its topic is of type fifo.

    Order is kept per key. Set `key` in Meta, unless every call passes one: `publish(..., key=...)`.
    """
    for kind in message_types().values():
        key, topic = kind._meta.key, kind._meta.topic
        if key and not hasattr(kind, key):
            fields = ", ".join(kind.__struct_fields__) or "none"
            yield Error(
                f"Message type {_name(kind)} has Meta.key = {key!r}, which is not a field of it.",
                hint=f"Its fields are: {fields}.",
                id="outbox.E013",
            )
        for name in kind._meta.mask:
            if name not in kind.__struct_fields__:
                yield Error(
                    f"Message type {_name(kind)} masks {name!r}, which is not a field of it, so this hides nothing.",
                    hint=f"Its fields are: {', '.join(kind.__struct_fields__) or 'none'}.",
                    id="outbox.E013",
                )
        if not key and topic and _type_of(topic) is TopicType.FIFO:
            yield Caution(
                f"Message type {_name(kind)} has no key, and its topic {topic!r} is of type fifo, which keeps order per key.",
                hint='Add `key = "..."` to its class Meta. If each publish() has key=, silence this check.',
                id="outbox.W014",
            )


@check()
def check_fields() -> Iterable[CheckMessage]:
    """
    E047: A field of a message type has a type that JSON cannot represent.

    Messages of the type cannot be published. Use plain types: a primary key, a text, a number, a list, a dict, another message
    type or a dataclass.
    """
    return [problem for kind in message_types().values() for problem in _problems_of_fields(kind)]


@check()
def check_annotations() -> Iterable[CheckMessage]:
    """
    W060: A message type has an attribute without an annotation.

    Such an attribute is no field, so the body does not contain it. Annotate it, with `ClassVar` if it should not be a field. A
    name in capitals is taken for a constant and not reported.
    """
    return [
        Caution(
            f"Message type {_name(kind)} has the attribute {name!r} without an annotation, so it is no field of the body.",
            hint=f"Write `{name}: {type(value).__name__} = {value!r}`, or `{name}: ClassVar = ...` if it should be no field.",
            id="outbox.W060",
        )
        for kind in message_types().values()
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and name not in (*kind.__struct_fields__, *_annotated(kind))
        and not (name.isupper() or isinstance(value, type) or hasattr(value, "__get__"))
    ]


@check()
def check_upgrades() -> Iterable[CheckMessage]:
    """
    E015: The upgrades of a message type do not lead to its version.

    A body is upgraded step by step: each version, from the oldest one with an upgrade up to the one before `Meta.version`, needs
    an upgrade. The version before the current one always needs one, because its messages may wait in the database, at the broker
    or as dead letters.
    """
    for kind in message_types().values():
        steps, version = kind._upgrades, kind._meta.version
        for step in sorted(step for step in steps if step >= version):
            text = f"Message type {_name(kind)} is at version {version} but has an upgrade from version {step}."
            yield Error(text, hint=f"Raise Meta.version to {step + 1}, or remove the upgrade.", id="outbox.E015")
        if version > 1 and not steps:
            text = (
                f"Message type {_name(kind)} is at version {version} and has no upgrade from version {version - 1}, whose "
                "messages would become dead letters."
            )
            hint = f"Add @{kind.__name__}.upgrade_from({version - 1}); if no such message exists, return the body as it is."
            yield Error(text, hint=hint, id="outbox.E015")
        for step in sorted(set(range(min(steps, default=version), version)) - set(steps)):
            text = f"Message type {_name(kind)} has an upgrade from version {min(steps)}, but not from version {step}."
            yield Error(text, hint=f"Add @{kind.__name__}.upgrade_from({step}).", id="outbox.E015")


@check()
def check_half_first() -> Iterable[CheckMessage]:
    """
    E035: A function for `half_first` returns a message type whose topic has no half messages.

    Set the topic's type to transaction, on a broker with half messages, or publish in the transaction. Only functions with an
    annotation are checked; others raise an error at the first call.
    """
    for name, kind in built_types():
        try:
            problem = topic_problem(kind._meta.topic) if kind._meta.topic else None
        except (UnknownTopic, ConfigurationError):  # E001, E003 or E006 reports it
            continue
        if problem:
            text = f"{name} returns {kind.__name__} for half_first, but {problem[0]}"
            yield Error(text, hint=problem[1], id="outbox.E035")


def _problems_of_fields(kind: type[Message]) -> Iterator[CheckMessage]:
    hint = "Use a plain type such as int, str, Decimal, datetime, a list or a dict of them, or a dataclass."
    try:
        fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    except Exception as error:  # TypeError or NameError, for example
        yield Error(f"Message type {_name(kind)} has annotations that cannot be read: {error}", hint=hint, id="outbox.E047")
        return
    for field in fields:
        for cls in _foreign_types(field.type, set()):
            text = f"Message type {_name(kind)} has the field {field.name!r} of type {cls.__module__}.{cls.__qualname__}"
            yield Error(f"{text}, which JSON cannot represent.", hint=hint, id="outbox.E047")


def _annotated(kind: type[Message]) -> Collection[str]:
    with suppress(NameError):  # since Python 3.14, annotations are evaluated only here; E047 reports the error
        return kind.__annotations__
    return ()


def _foreign_types(node: object, seen: set[type]) -> Iterator[type]:
    """Yield the types in an annotation whose values cannot be decoded from JSON."""
    if isinstance(node, msgspec.inspect.CustomType):
        if not (any(issubclass(plain, node.cls) for plain in PLAIN) or values_of_enum(node.cls)):
            yield node.cls
        return
    kind = getattr(node, "cls", None)
    if isinstance(kind, type):
        if kind in seen:
            return
        seen.add(kind)
    inner = [getattr(node, name, None) for name in ("type", "item_type", "key_type", "value_type")]
    for child in (*inner, *getattr(node, "types", ()), *getattr(node, "item_types", ()), *getattr(node, "fields", ())):
        if isinstance(child, msgspec.inspect.Type | msgspec.inspect.Field):
            yield from _foreign_types(child, seen)


def _type_of(topic: str) -> TopicType | None:
    try:
        return conf.topic_settings(topic).type
    except (UnknownTopic, ConfigurationError):
        return None


def _name(kind: type[Message]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

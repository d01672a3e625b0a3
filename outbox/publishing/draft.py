"""Turn a message into a draft: validate it, encode the body, and write the headers. This needs no database."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from outbox import conf, tracing
from outbox.errors import InvalidMessage
from outbox.ids import uuid7
from outbox.message import Header, Message, TopicType, current_cause, prepare
from outbox.publishing import rules

if TYPE_CHECKING:
    from outbox.brokers.base import Broker

CLOCK_MARGIN = timedelta(minutes=1)
"""A broker gets a delayed message only when the rest of the delay is this much below the broker's limit, as clocks may differ."""

NO_TIME = timedelta(0)

_encode = msgspec.json.Encoder().encode


class Draft(msgspec.Struct, frozen=True):
    """
    A valid message with its id, before its database is chosen.

    Args:
        subject: the name of the message in error texts.
        headers: a JSON object of strings.
        wait: how long the message waits in the database before it gets its ticket, with which a relay can claim it.
    """

    subject: str
    id: UUID
    topic: str
    broker: str
    is_ordered: bool
    key: str
    headers: str
    body: bytes
    wait: timedelta


class _Route(msgspec.Struct, frozen=True):
    """The broker of a topic according to the settings, and its limits. `broker_delays`: the broker itself delays messages."""

    topic: str
    broker: str
    broker_class: type[Broker]
    body_bytes: int
    is_ordered: bool
    broker_delays: bool


def compose(
    message: Message,
    *,
    key: str | None = None,
    tag: str | None = None,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
) -> Draft:
    """
    Make a draft of a message of a declared type.

    Raises:
        InvalidMessage: the message breaks one of the rules, or a field has another type than declared.
    """
    if not isinstance(message, Message):
        raise InvalidMessage(
            f"publish() takes an instance of a Message type, not {message!r}.",
            hint=f"Write {message.__name__}(...)." if isinstance(message, type) else "Define one, or use publish_raw().",
        )
    meta = message._meta
    subject = type(message).__name__
    if not meta.topic:
        raise InvalidMessage(f"{subject} names no topic.", hint='Add `class Meta: topic = "..."` to it.')
    return _draft(
        subject,
        meta.topic,
        _encode_message(message),
        key=_key_of(message) if key is None else key,
        tag=meta.tag if tag is None else tag,
        headers=headers,
        delay=delay,
        outbox_headers={
            Header.TYPE: _plain(meta.type),
            Header.VERSION: str(meta.version),
            Header.CONTENT_TYPE: "application/json",
        },
    )


def compose_raw(
    topic: str,
    body: bytes | Mapping[str, Any],
    *,
    key: str = "",
    tag: str = "",
    headers: Mapping[str, str] | None = None,
    content_type: str | None = None,
    delay: timedelta | None = None,
) -> Draft:
    """
    Make a draft of a body without a message type; a dict is encoded as JSON.

    Raises:
        InvalidMessage: the message breaks one of the rules, or the body cannot be written as JSON.
    """
    subject = f"A raw message to topic {topic!r}"
    if isinstance(body, Mapping):
        body, default_type = _encode_mapping(subject, body), "application/json"
    elif isinstance(body, bytes):
        default_type = "application/octet-stream"
    else:
        raise InvalidMessage(f"{subject} has a body of type {type(body).__name__}.", hint="Pass bytes, or a dict for JSON.")
    if content_type is not None:
        rules.check_content_type(subject, content_type)
    rules.check_topic(subject, topic)
    outbox_headers = {Header.CONTENT_TYPE: _plain(content_type or default_type)}
    return _draft(subject, topic, body, key=key, tag=tag, headers=headers, delay=delay, outbox_headers=outbox_headers)


def compose_encoded(subject: str, topic: str, body: bytes, *, type: str, key: str, content_type: str) -> Draft:  # noqa: A002
    """
    Make a draft of a body that the caller has already encoded.

    Args:
        type: the name of the message's type on the wire; there need not be a `Message` of that name.

    Raises:
        InvalidMessage: the message breaks one of the rules.
    """
    outbox_headers = {Header.TYPE: type, Header.CONTENT_TYPE: content_type}
    return _draft(subject, topic, body, key=key, tag="", headers=None, delay=None, outbox_headers=outbox_headers)


def _draft(
    subject: str,
    topic: str,
    body: bytes,
    *,
    key: str,
    tag: str,
    headers: Mapping[str, str] | None,
    delay: timedelta | None,
    outbox_headers: dict[str, str],
) -> Draft:
    rules.check_topic(subject, topic)
    route = _route_of(_plain(topic))
    rules.check_key(subject, key, topic=topic, is_ordered=route.is_ordered)
    rules.check_body(subject, body, topic=topic, limit=route.body_bytes)
    if tag:
        rules.check_tag(subject, tag)
        outbox_headers[Header.TAG] = _plain(tag)
    if headers:
        rules.check_headers(subject, headers)
        headers = {_plain(name): _plain(value) for name, value in headers.items()}
    wait = NO_TIME if delay is None else _wait(subject, delay, route, outbox_headers)
    message_id = uuid7()
    cause = current_cause.get()
    if cause is None:  # the message is not published by a handler, so it starts a chain
        outbox_headers[Header.CORRELATION_ID] = str(message_id)
    else:
        outbox_headers[Header.CORRELATION_ID] = cause.correlation_id
        outbox_headers[Header.CAUSATION_ID] = cause.message_id
    if not (headers and Header.TRACEPARENT in headers):
        # If this process creates no trace, the message continues the trace of the message that is being handled.
        traceparent = tracing.create(topic, message_id, len(body)) or (cause.traceparent if cause else "")
        if traceparent:
            outbox_headers[Header.TRACEPARENT] = traceparent
    written = _encode({**headers, **outbox_headers} if headers else outbox_headers).decode()
    return Draft(subject, message_id, route.topic, route.broker, route.is_ordered, _plain(key), written, body, wait)


def _plain(text: str) -> str:
    """Return a string as a plain str, since JSON and psycopg reject some subclasses; a (str, Enum) member becomes its value."""
    return text if type(text) is str else str.__str__(text)


@conf.cached
def _route_of(topic: str) -> _Route:
    settings = conf.topic_settings(topic)
    is_ordered, broker_delays = settings.type is TopicType.FIFO, settings.type is TopicType.DELAY
    kind = conf.broker_class(settings.broker)
    limits = kind.limits(conf.settings().brokers[settings.broker].options, conf.topic_spec(topic))
    return _Route(topic, settings.broker, kind, limits.body_bytes, is_ordered, broker_delays)


def _wait(subject: str, delay: timedelta, route: _Route, outbox_headers: dict[str, str]) -> timedelta:
    """
    Return how long a message waits in the database.

    If the broker itself delays messages, add the time of delivery to the outbox's headers.
    """
    rules.check_delay(subject, delay, topic=route.topic, is_ordered=route.is_ordered)
    if not (delay and route.broker_delays):
        return delay
    outbox_headers[Header.DELIVER_AT] = (datetime.now(UTC) + delay).isoformat()
    return max(NO_TIME, delay - route.broker_class.max_delay + CLOCK_MARGIN)


def _encode_message(message: Message) -> bytes:
    """Encode the body, and decode it again as its type, so that a message that no handler could read is not published."""
    kind = type(message)
    try:
        body = _encode(message)
        _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        text = f"{path.rstrip('`')}: {problem}" if path else problem  # the text begins with the field: `order_id: Expected ...`
        raise InvalidMessage(
            f"{kind.__name__} has a field that is not of its declared type: {text}.",
            hint="Correct the value, or the type.",
        ) from error
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        raise InvalidMessage(
            f"{kind.__name__} cannot be written as JSON: {_describe_unwritable(fields, 'field')}{error}.",
            hint="Put what others need of it into fields of plain types: its primary key, a text, a number.",
        ) from error
    if b"null" in body:
        _reject_nan(kind.__name__, {name: getattr(message, name) for name in message.__struct_fields__}, "field")
    return body


def _encode_mapping(subject: str, body: Mapping[str, Any]) -> bytes:
    try:
        encoded = _encode(dict(body))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        named = _describe_unwritable(body, "entry")
        raise InvalidMessage(
            f"{subject} has a body that cannot be written as JSON: {named}{error}.", hint="Pass bytes."
        ) from error
    if b"null" in encoded:
        _reject_nan(subject, body, "entry")
    return encoded


def _reject_nan(subject: str, values: Mapping[str, Any], what: str) -> None:
    """Raise InvalidMessage if a value contains NaN or infinity: msgspec writes them as null, so they would be lost silently."""
    for name, value in values.items():
        if _has_nan(value):
            raise InvalidMessage(
                f"{subject} cannot be written as JSON: its {what} {name!r} has a number that is infinite or not a number (NaN).",
                hint="Pass None, or a text.",
            )


def _has_nan(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(_has_nan, value.values()))
    if isinstance(value, msgspec.Struct):
        return any(_has_nan(getattr(value, name)) for name in value.__struct_fields__)
    return isinstance(value, list | tuple | set | frozenset) and any(map(_has_nan, value))


def _describe_unwritable(values: Mapping[str, Any], what: str) -> str:
    """Return a phrase that names the first value that JSON cannot represent, with its type; "" if there is none."""
    for name, value in values.items():
        try:
            _encode(value)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
            return f"its {what} {name!r} holds a {type(value).__module__}.{type(value).__qualname__}. "
    return ""


def _key_of(message: Message) -> str:
    field = message._meta.key
    if not field:
        return ""
    try:
        value = getattr(message, field)
    except AttributeError as error:
        raise InvalidMessage(
            f"{type(message).__name__}.Meta.key names {field!r}, which is not one of its fields.",
            hint=f"Its fields are {', '.join(message.__struct_fields__) or 'none'}.",
        ) from error
    value = value.value if isinstance(value, Enum) else value  # the body has the member's value, too
    return "" if value is None else str(value)


@cache
def _decoder(kind: type[Message]) -> msgspec.json.Decoder[Message]:
    prepare(kind)
    return msgspec.json.Decoder(kind)

"""From a message to a draft: rules checked, body encoded, headers written. No database is touched yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID

import msgspec

from outbox import conf, tracing
from outbox.errors import InvalidMessage
from outbox.ids import uuid7
from outbox.message import Header, Message, TopicType, current_cause, prepare
from outbox.publishing import rules

CLOCK_MARGIN = timedelta(minutes=1)
"""How far the database's clock may lag behind ours without a broker hearing of a delay beyond its limit."""

NO_TIME = timedelta(0)

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Draft:
    """
    A message that keeps the rules and has its id; which database it goes to is open.

    Args:
        subject: what error texts call it.
        headers: JSON object of texts.
        wait: how long it waits in the database before it gets its ticket.
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
        raise InvalidMessage(f"publish() takes an instance of a Message type, not {message!r}. Define one, or use publish_raw().")
    meta = message._meta
    subject = type(message).__name__
    if not meta.topic:
        raise InvalidMessage(f'{subject} names no topic. Add `class Meta: topic = "..."` to it.')
    return _draft(
        subject,
        meta.topic,
        _encode_message(message),
        key=_key_of(message) if key is None else key,
        tag=meta.tag if tag is None else tag,
        headers=headers,
        delay=delay,
        own={
            Header.TYPE: meta.type,
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
    Make a draft of a body of any kind; a dict is written as JSON.

    Raises:
        InvalidMessage: the message breaks one of the rules, or the body cannot be written as JSON.
    """
    subject = f"A raw message to topic {topic!r}"
    if isinstance(body, Mapping):
        body, default_type = _encode_mapping(subject, body), "application/json"
    elif isinstance(body, bytes):
        default_type = "application/octet-stream"
    else:
        raise InvalidMessage(f"{subject} has a body of type {type(body).__name__}. Pass bytes, or a dict for JSON.")
    if content_type is not None:
        rules.check_content_type(subject, content_type)
    own = {Header.CONTENT_TYPE: content_type or default_type}
    return _draft(subject, topic, body, key=key, tag=tag, headers=headers, delay=delay, own=own)


def _draft(
    subject: str,
    topic: str,
    body: bytes,
    *,
    key: str,
    tag: str,
    headers: Mapping[str, str] | None,
    delay: timedelta | None,
    own: dict[str, str],
) -> Draft:
    rules.check_topic(subject, topic)
    settings = conf.topic_settings(topic)
    broker = conf.broker_class(settings.broker)
    is_ordered = settings.type is TopicType.FIFO
    rules.check_key(subject, key, topic=topic, is_ordered=is_ordered)
    rules.check_body(subject, body, topic=topic, limit=broker.max_body_bytes)
    if tag:
        rules.check_tag(subject, tag)
        own[Header.TAG] = tag
    if headers:
        rules.check_headers(subject, headers)
    wait = NO_TIME
    if delay is not None:
        rules.check_delay(subject, delay, topic=topic, is_ordered=is_ordered)
        wait = delay
        if delay and settings.type is TopicType.DELAY:
            own[Header.DELIVER_AT] = (datetime.now(UTC) + delay).isoformat()
            wait = max(NO_TIME, delay - broker.max_delay + CLOCK_MARGIN)
    message_id = uuid7()
    _add_origin(own, message_id)
    if not (headers and Header.TRACEPARENT in headers):
        _add_trace(own, topic, message_id, body)
    written = _encode({**headers, **own} if headers else own).decode()
    return Draft(subject, message_id, topic, settings.broker, is_ordered, key, written, body, wait)


def _add_origin(headers: dict[str, str], message_id: UUID) -> None:
    """Return which message caused this one, and which began the story; a message without a cause begins its own."""
    cause = current_cause.get()
    if cause is None:
        headers[Header.CORRELATION_ID] = str(message_id)
    else:
        headers[Header.CORRELATION_ID] = cause.correlation_id
        headers[Header.CAUSATION_ID] = cause.message_id


def _add_trace(own: dict[str, str], topic: str, message_id: UUID, body: bytes) -> None:
    """Begin a span of the message; where nothing is traced here, go on with the trace of the message being handled."""
    cause = current_cause.get()
    traceparent = tracing.create(topic, message_id, len(body)) or (cause.traceparent if cause else "")
    if traceparent:
        own[Header.TRACEPARENT] = traceparent


def _encode_message(message: Message) -> bytes:
    """Write the body, and read it again as its type: what could not be handled is not published."""
    kind = type(message)
    try:
        body = _encode(message)
        _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise InvalidMessage(
            f"{kind.__name__} has a field that is not of its declared type: {error}. Correct the value, or the type."
        ) from error
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        raise InvalidMessage(
            f"{kind.__name__} cannot be written as JSON: {_name_unwritable(fields, 'field')}{error}. Put what others need of it "
            "into fields of plain types: its primary key, a text, a number."
        ) from error
    return body


def _encode_mapping(subject: str, body: Mapping[str, Any]) -> bytes:
    try:
        return _encode(dict(body))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        named = _name_unwritable(body, "entry")
        raise InvalidMessage(f"{subject} has a body that cannot be written as JSON: {named}{error}. Pass bytes.") from error


def _name_unwritable(values: Mapping[str, Any], what: str) -> str:
    """Name the first of a body's values that JSON cannot hold, with its type; nothing where it is none of them alone."""
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
            f"{type(message).__name__}.Meta.key names {field!r}, which is no field of it. "
            f"Its fields are {', '.join(message.__struct_fields__) or 'none'}."
        ) from error
    return "" if value is None else str(value)


@cache
def _decoder(kind: type[Message]) -> msgspec.json.Decoder[Message]:
    prepare(kind)
    return msgspec.json.Decoder(kind)

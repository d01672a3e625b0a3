"""Find the handler of a delivery, and decode the message that it receives."""

from __future__ import annotations

from typing import Any

import msgspec

from outbox.brokers.base import Delivery
from outbox.consuming.delivery_info import require_readable
from outbox.consuming.register import Consumer, Group
from outbox.errors import UnknownMessageType, UnreadableBody
from outbox.message import Header, Message, message_type

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # RecursionError: deeply nested arrays


def find_consumer(group: Group, delivery: Delivery) -> Consumer | None:
    """
    Return the group's handler of a message; None if the group's handlers take only messages of other types or tags.

    Raises:
        UnknownMessageType: no module of this process defines the type, and no handler of the group takes every type of the topic.
    """
    type_name = delivery.headers.get(Header.TYPE, "")
    consumer = group.find(delivery.topic, type_name, delivery.tag)
    if consumer is None and type_name and message_type(type_name) is None and not group.takes_all_of(delivery.topic):
        raise UnknownMessageType(
            f"Message {delivery.message_id} on topic {delivery.topic!r} has the type {type_name!r}, which no module "
            "here defines.",
            hint="Deploy the code that defines it (is its module called messages.py, and its app installed?). "
            f"If group {group.name!r} should ignore it, define the type without a handler, or give the group's handlers "
            f'tags. To handle it without a type: @consumer(topic="{delivery.topic}", group="{group.name}").',
        )
    return consumer


def read(consumer: Consumer, delivery: Delivery) -> Any:
    """
    Decode a message for its handler.

    Raises:
        UnreadableBody, UnknownMessageType: see `require_readable` and `read_as`.
    """
    require_readable(delivery)  # a dead letter has an id, so only this keeps the bytes from a handler when it is replayed
    return _read_plain(delivery) if consumer.type is None else read_as(consumer.type, delivery)


def read_as(kind: type[Message], delivery: Delivery) -> Message:
    """
    Decode a message of a type.

    If the body does not fit the type, retries would not help, so the message becomes a dead letter at once. An operator can
    replay it after the type, or the upgrade from an older version, was corrected. If such a body has a newer version than the
    type, the message is retried instead: during a deployment, this process may run the older release.

    Raises:
        UnreadableBody: the body does not fit the type, or is not valid JSON; the error text names the field.
        UnknownMessageType: the body has a newer version and does not fit the type.
    """
    version = version_of(delivery)
    try:
        return kind.from_body(delivery.body, version)
    except NOT_JSON as error:
        if version is not None and version > kind._meta.version:
            raise _newer_version_error(kind, version, delivery, error) from error
        raise UnreadableBody(
            f"The body of message {delivery.message_id} does not fit {kind._meta.type}: {error}.",
            hint="Correct the type, or add an upgrade from the older version, and replay the dead letter.",
        ) from error


def _read_plain(delivery: Delivery) -> Any:
    if not delivery.headers.get(Header.CONTENT_TYPE, "").startswith("application/json"):
        return delivery.body
    try:
        return msgspec.json.decode(delivery.body)
    except NOT_JSON as error:
        text = f"The body of message {delivery.message_id} has a JSON content type, but is not valid JSON: {error}."
        raise UnreadableBody(text) from error


def version_of(delivery: Delivery) -> int | None:
    """Return the version of its type with which a message was published; None if its headers name no valid version."""
    version = delivery.headers.get(Header.VERSION, "")
    return int(version) if version.isdecimal() and len(version) < 10 else None


def _newer_version_error(type_: type[Message], version: int, delivery: Delivery, error: Exception) -> UnknownMessageType:
    return UnknownMessageType(
        f"Message {delivery.message_id} is {type_._meta.type} of version {version}; this process knows it up to version "
        f"{type_._meta.version}, which the body does not fit: {error}.",
        hint="Deploy the newer code.",
    )

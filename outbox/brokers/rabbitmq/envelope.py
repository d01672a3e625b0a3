"""
Messages as AMQP carries them: the id, the body and the headers as properties of the same names, the key as a header.

A copy of a message that goes to one group only (a retry, a dead letter, a replay) carries what the group has to know of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import amqp

from outbox.brokers.base import Delivery, Outgoing
from outbox.brokers.rabbitmq.topology import DELAY_QUEUES, DESTINATION
from outbox.message import Header

KEY = "outbox-key"
TAG = "outbox-tag"
STORED_AT = "outbox-stored-at"  # microseconds since 1970, by the sender's clock: RabbitMQ notes none
DELIVERY_COUNT = "outbox-delivery-count"  # deliveries before this copy
REASON = "outbox-reason"
DIED_AT = "outbox-died-at"
OURS = (KEY, TAG, STORED_AT, DELIVERY_COUNT, REASON, DIED_AT, DESTINATION)

THEIRS = {"x-death", "x-delivery-count", "x-acquired-count"}  # RabbitMQ's, and those that begin so:
THEIR_PREFIXES = ("x-first-death-", "x-last-death-")

PERSISTENT = 2
MAX_DELIVERY_COUNT = 1_000_000  # another producer may have written any number
MAX_NAME_BYTES = 255  # of a header's name or a routing key
MAX_TAG_BYTES = MAX_NAME_BYTES - 2 * DELAY_QUEUES
MAX_HEADER_BYTES = 100_000  # together; they travel in one frame of 128 KiB


def to_amqp(message: Outgoing, *, destination: str = "") -> amqp.Message:
    """Return a message to publish. `destination`: where it goes when its delay is over."""
    headers: dict[str, Any] = {**message.headers, KEY: message.key, TAG: message.tag, STORED_AT: time.time_ns() // 1000}
    if destination:
        headers[DESTINATION] = destination
    return _new(message.body, message.message_id, headers)


def copy_of(delivery: Delivery, *, delivery_count: int, **extra: Any) -> amqp.Message:
    """Return a copy of a delivered message for its group; `extra`: headers of ours."""
    stored_at = delivery.stored_at or datetime.now(UTC)
    headers = {
        **delivery.headers,
        KEY: delivery.key,
        TAG: delivery.tag,
        STORED_AT: micros_of(stored_at),
        DELIVERY_COUNT: delivery_count,
        **extra,
    }
    return _new(delivery.body, delivery.message_id, headers)


def _new(body: bytes, message_id: str, headers: Mapping[str, Any]) -> amqp.Message:
    properties: dict[str, Any] = {"message_id": message_id, "delivery_mode": PERSISTENT, "application_headers": headers}
    content_type = headers.get(Header.CONTENT_TYPE, "")
    if 0 < len(content_type.encode()) <= MAX_NAME_BYTES:
        properties["content_type"] = content_type
    return amqp.Message(body, **properties)


def again(message: amqp.Message) -> amqp.Message:
    """Return a received message to publish it once more, without the headers of RabbitMQ."""
    properties = dict(message.properties)
    headers = properties.pop("application_headers", None) or {}
    return amqp.Message(message.body, **properties, application_headers={k: v for k, v in headers.items() if not _is_theirs(k)})


def to_delivery(message: amqp.Message, *, group: str, topic: str, receipt: str) -> Delivery:
    """
    Return a received message; docs/brokers/messages.md says what is read of another producer's.

    Headers that are not text are shown as text.
    """
    raw = message.properties.get("application_headers") or {}
    body = message.body
    headers = {name: str(value) for name, value in raw.items() if _is_users(name)}
    if content_type := message.properties.get("content_type"):
        headers.setdefault(Header.CONTENT_TYPE, str(content_type))
    return Delivery(
        group=group,
        topic=topic,
        message_id=str(message.properties.get("message_id") or headers.get(Header.ID, "")),
        body=body.encode() if isinstance(body, str) else bytes(body),
        receipt=receipt,
        key=str(raw.get(KEY) or headers.get(Header.SUBJECT, "")),
        tag=str(raw.get(TAG, message.delivery_info.get("routing_key", ""))),
        headers=headers,
        delivery_count=count_before(raw) + 1,
        stored_at=time_of(raw.get(STORED_AT)),
    )


def count_before(raw: Mapping[str, Any]) -> int:
    """Return how often a message was delivered to its group before: as earlier copies, and as this one."""
    return count_noted(raw) + _number(raw.get("x-delivery-count"))


def count_noted(raw: Mapping[str, Any]) -> int:
    """Return how often a message was delivered to its group as earlier copies; 0 where that cannot be read."""
    return _number(raw.get(DELIVERY_COUNT))


def _number(value: Any) -> int:
    return min(value, MAX_DELIVERY_COUNT) if isinstance(value, int) and value > 0 else 0


def too_large_for_amqp(message: Outgoing) -> str:
    """Return what is too long for AMQP in a message; "" where all fits."""
    if len(message.tag.encode()) > MAX_TAG_BYTES:
        return f"The tag has {len(message.tag.encode())} bytes; RabbitMQ takes {MAX_TAG_BYTES}."
    if len(message.message_id.encode()) > MAX_NAME_BYTES:
        return f"The message id has {len(message.message_id.encode())} bytes; RabbitMQ takes {MAX_NAME_BYTES}."
    if long := [name for name in message.headers if len(name.encode()) > MAX_NAME_BYTES]:
        return f"The name of header {long[0][:40]!r}... has more than {MAX_NAME_BYTES} bytes, the limit of AMQP."
    total = sum(len(name.encode()) + len(value.encode()) + 10 for name, value in message.headers.items())
    if total + len(message.key.encode()) > MAX_HEADER_BYTES:
        return f"Headers and key have {total + len(message.key.encode())} bytes together; RabbitMQ takes {MAX_HEADER_BYTES}."
    return ""


def _is_users(name: str) -> bool:
    return name not in OURS and not _is_theirs(name)


def _is_theirs(name: str) -> bool:
    return name in THEIRS or name.startswith(THEIR_PREFIXES)


def micros_of(time: datetime) -> int:
    """Return a time as our headers have it: microseconds since 1970."""
    return round(time.timestamp() * 1e6)


def time_of(micros: Any) -> datetime | None:
    """Return the time in a header of ours; None where it is missing, or another producer has written something else there."""
    try:
        return datetime.fromtimestamp(micros / 1e6, UTC) if isinstance(micros, int) else None
    except (OverflowError, ValueError, OSError):
        return None

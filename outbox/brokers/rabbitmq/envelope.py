"""Conversion of messages to AMQP and back: id, body and headers are in the properties of the same names, the key is a header."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import amqp
from msgspec.structs import replace

from outbox.brokers.base import Delivery, Outgoing, SendResult, SendStatus
from outbox.brokers.types import MAX_DELIVERY_COUNT
from outbox.message import Header

KEY = "outbox-key"
TAG = "outbox-tag"
STORED_AT = "outbox-stored-at"  # microseconds since 1970, by the sender's clock, because RabbitMQ records no time

# Headers that the outbox or RabbitMQ has added to those of the message. RabbitMQ adds others with these prefixes.
HIDDEN = {KEY, TAG, STORED_AT, "x-death", "x-delivery-count", "x-acquired-count"}  # left out of a delivery's headers
HIDDEN_PREFIXES = ("x-first-death-", "x-last-death-")

REASONS = {  # reason in "x-death" -> text for operators
    "delivery_limit": "RabbitMQ delivered it too often, and it was not acknowledged (delivery-limit).",
    "expired": "It was in its queue for longer than the topic's RETENTION, or than a policy allows.",
    "maxlen": "Its queue was full, and by a policy the queue drops its oldest messages.",
}

PERSISTENT = 2
MAX_NAME_BYTES = 255  # of a header's name or a routing key
MAX_HEADER_BYTES = 100_000  # of all headers together, because they travel in one frame of 128 KiB


def to_amqp(message: Outgoing) -> amqp.Message:
    """Return the AMQP message to publish for a message."""
    headers: dict[str, Any] = {**message.headers, KEY: message.key, TAG: message.tag, STORED_AT: time.time_ns() // 1000}
    properties: dict[str, Any] = {"message_id": message.message_id, "delivery_mode": PERSISTENT, "application_headers": headers}
    content_type = headers.get(Header.CONTENT_TYPE, "")
    if 0 < len(content_type.encode()) <= MAX_NAME_BYTES:
        properties["content_type"] = content_type
    return amqp.Message(message.body, **properties)


def to_delivery(message: amqp.Message, *, group: str, topic: str) -> Delivery:
    """
    Return the delivery of a received message, without a receipt. For messages of other producers, see docs/brokers/messages.md.

    Headers of other types are converted to text. No content of another producer's message makes this raise.
    """
    raw = {_text(name): value for name, value in (message.properties.get("application_headers") or {}).items()}
    body = message.body
    headers = {name: _text(value) for name, value in raw.items() if name not in HIDDEN and not name.startswith(HIDDEN_PREFIXES)}
    if content_type := message.properties.get("content_type"):
        headers.setdefault(Header.CONTENT_TYPE, _text(content_type))
    return Delivery(
        group=group,
        topic=topic,
        message_id=_text(message.properties.get("message_id") or headers.get(Header.ID, "")),
        body=body.encode() if isinstance(body, str) else bytes(body),
        receipt="",
        key=_text(raw.get(KEY) or headers.get(Header.SUBJECT, "")),
        tag=_text(raw.get(TAG, message.delivery_info.get("routing_key", ""))),
        headers=headers,
        delivery_count=_count(raw, is_redelivered=bool(message.delivery_info.get("redelivered"))),
        stored_at=time_of(raw.get(STORED_AT)),
    )


def dead_letter(message: amqp.Message, *, group: str, topic: str, queue: str) -> Delivery:
    """Return the delivery of a message in a dead-letter queue, with the reason why the server moved it there from its queue."""
    deaths = (message.properties.get("application_headers") or {}).get("x-death")
    known = [death for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []
    death = next((death for death in known if death.get("queue") == queue), {})
    reason, keys = _text(death.get("reason", "")), death.get("routing-keys")
    text = REASONS.get(reason, f"RabbitMQ gave it up: {reason or 'without a reason'}.")
    delivery = replace(to_delivery(message, group=group, topic=topic), dead_letter_reason=text)
    # If the message has no header TAG, its tag is the routing key, which is now that of the dead-letter queue.
    if isinstance(keys, list) and keys and delivery.tag == message.delivery_info.get("routing_key"):
        return replace(delivery, tag=_text(keys[0]))
    return delivery


def _count(raw: Mapping[str, Any], *, is_redelivered: bool) -> int:
    """
    Return how often a message was delivered to its group; 1 only if this is certainly the first time.

    Since RabbitMQ 4.3, messages that are returned, or taken back after `consumer_timeout`, only raise `x-acquired-count`.
    """
    counts = (raw.get(name) for name in ("x-delivery-count", "x-acquired-count"))
    before = max(count if isinstance(count, int) else 0 for count in counts)
    return min(max(before, int(is_redelivered), 0), MAX_DELIVERY_COUNT) + 1


def too_large(message: Outgoing) -> SendResult | None:
    """Return the result of a message whose tag, id or headers are too long for AMQP; None if they are not."""
    tag, id_ = len(message.tag.encode()), len(message.message_id.encode())
    long = next((name for name in message.headers if len(name.encode()) > MAX_NAME_BYTES), "")
    headers = sum(len(name.encode()) + len(value.encode()) + 10 for name, value in message.headers.items())
    total = headers + len(message.key.encode())
    if tag > MAX_NAME_BYTES:
        reason = f"The tag has {tag} bytes; RabbitMQ takes {MAX_NAME_BYTES}."
    elif id_ > MAX_NAME_BYTES:
        reason = f"The message id has {id_} bytes; RabbitMQ takes {MAX_NAME_BYTES}."
    elif long:
        reason = f"The name of header {long[:40]!r}... has more than {MAX_NAME_BYTES} bytes, the limit of AMQP."
    elif total > MAX_HEADER_BYTES:
        reason = f"Headers and key have {total} bytes together; RabbitMQ takes {MAX_HEADER_BYTES}."
    else:
        return None
    return SendResult(SendStatus.REFUSED, reason=reason)


def _text(value: Any) -> str:
    """Return a value as text that UTF-8 can encode."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if text.isascii() else text.encode(errors="surrogatepass").decode(errors="replace")


def time_of(micros: Any) -> datetime | None:
    """Return the time in the header STORED_AT; None if it is missing, or if another producer has written anything else there."""
    try:
        return datetime.fromtimestamp(micros / 1e6, UTC) if isinstance(micros, int) else None
    except (OverflowError, ValueError, OSError):
        return None

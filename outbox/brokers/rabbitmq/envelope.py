"""
Messages as AMQP carries them: the id, the body and the headers as properties of the same names, the key as a header.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import amqp
from msgspec.structs import replace

from outbox.brokers.base import Delivery, Outgoing, SendResult, SendStatus
from outbox.message import Header

KEY = "outbox-key"
TAG = "outbox-tag"
STORED_AT = "outbox-stored-at"  # microseconds since 1970, by the sender's clock: RabbitMQ notes none

# Headers that are ours, and RabbitMQ's, besides those that begin so:
HIDDEN = {KEY, TAG, STORED_AT, "x-death", "x-delivery-count", "x-acquired-count"}
THEIR_PREFIXES = ("x-first-death-", "x-last-death-")

REASONS = {  # by the reason in "x-death"
    "delivery_limit": "RabbitMQ delivered it too often, and it was not acknowledged (delivery-limit).",
    "expired": "It was in its queue for longer than the topic's RETENTION, or than a policy allows.",
    "maxlen": "Its queue was full, and a policy has the oldest messages dropped then.",
}

PERSISTENT = 2
MAX_DELIVERY_COUNT = 1_000_000  # another producer may have written any number
MAX_NAME_BYTES = 255  # of a header's name or a routing key
MAX_HEADER_BYTES = 100_000  # together; they travel in one frame of 128 KiB


def to_amqp(message: Outgoing) -> amqp.Message:
    """Return a message to publish."""
    headers: dict[str, Any] = {**message.headers, KEY: message.key, TAG: message.tag, STORED_AT: time.time_ns() // 1000}
    properties: dict[str, Any] = {"message_id": message.message_id, "delivery_mode": PERSISTENT, "application_headers": headers}
    content_type = headers.get(Header.CONTENT_TYPE, "")
    if 0 < len(content_type.encode()) <= MAX_NAME_BYTES:
        properties["content_type"] = content_type
    return amqp.Message(message.body, **properties)


def to_delivery(message: amqp.Message, *, group: str, topic: str) -> Delivery:
    """
    Return a received message, without a receipt; docs/brokers/messages.md says what is read of another producer's.

    Headers that are not text are shown as text. Nothing that another producer may have written raises.
    """
    raw = {_text(name): value for name, value in (message.properties.get("application_headers") or {}).items()}
    body = message.body
    headers = {name: _text(value) for name, value in raw.items() if name not in HIDDEN and not name.startswith(THEIR_PREFIXES)}
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


def given_up(message: amqp.Message, *, group: str, topic: str, queue: str) -> Delivery:
    """Return a message that the server took out of a queue, with the server's reason."""
    deaths = (message.properties.get("application_headers") or {}).get("x-death")
    known = [death for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []
    death = next((death for death in known if death.get("queue") == queue), {})
    reason, keys = _text(death.get("reason", "")), death.get("routing-keys")
    text = REASONS.get(reason, f"RabbitMQ gave it up: {reason or 'it did not say why'}.")
    delivery = replace(to_delivery(message, group=group, topic=topic), given_up=text)
    if isinstance(keys, list) and keys and delivery.tag == message.delivery_info.get("routing_key"):  # now that of the inlet
        return replace(delivery, tag=_text(keys[0]))
    return delivery


def _count(raw: Mapping[str, Any], *, is_redelivered: bool) -> int:
    """
    Return how often a message was delivered to its group; 1 only if this is certainly the first time.

    From 4.3 on, a return, and the end of the server's `consumer_timeout`, raise `x-acquired-count` alone.
    """
    counts = (raw.get(name) for name in ("x-delivery-count", "x-acquired-count"))
    before = max(count if isinstance(count, int) else 0 for count in counts)
    return min(max(before, int(is_redelivered), 0), MAX_DELIVERY_COUNT) + 1


def too_large(message: Outgoing) -> SendResult | None:
    """Return the result of a message in which something is too long for AMQP, or None."""
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
    """Return a value as text that UTF-8 can carry."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if text.isascii() else text.encode(errors="surrogatepass").decode(errors="replace")


def time_of(micros: Any) -> datetime | None:
    """Return the time in a header of ours; None where it is missing, or another producer has written something else there."""
    try:
        return datetime.fromtimestamp(micros / 1e6, UTC) if isinstance(micros, int) else None
    except (OverflowError, ValueError, OSError):
        return None

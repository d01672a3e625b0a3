"""Conversion of messages to RocketMQ's formats and back."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from uuid import uuid4

import msgspec

from outbox.brokers.base import DEFAULT_MAX_BODY_BYTES, Delivery, Outgoing
from outbox.brokers.rocketmq.remoting.frames import COMPRESSED, HALF, StoredMessage
from outbox.brokers.rocketmq.stubs import definition
from outbox.brokers.types import MAX_DELIVERY_COUNT
from outbox.message import Half, Header, TopicType

_headers = msgspec.json.Decoder(dict[str, str])

# Properties for values that RocketMQ has no field for. Each is set only if it is needed.
KEY, TOKEN, HEADERS = "outbox-key", "outbox-token", "outbox-headers"

# Separates the message id from the random part of a half id.
HALF_MARK = "."

# RocketMQ can carry a header as a property if the name has no capitals, which RocketMQ reserves for its own properties, and if
# the value has no control characters.
PLAIN_NAME = re.compile(r"[a-z][a-z0-9._-]*")
PLAIN_VALUE = re.compile(r"[^\x00-\x1f\x7f]+")
PLAIN_KEY = re.compile(r"[^\x00-\x20\x7f]+")  # RocketMQ joins keys with spaces
MAX_GROUP_BYTES = 63

# The server sends the first check-back when a half message's born time is transactionTimeOut ago, or at once if it is in the
# future. So the born time is set back by a second, and the clocks may differ by a second in either direction.
BORN_EARLIER_SECONDS = 1.0

# The protocol has one flag for "compressed", and no field for the algorithm. Newer clients recognize the algorithm by the first
# bytes; the clients of RocketMQ 4 and the C++ client assume zlib.
COMPRESSION_LEVEL = 5
GZIP_MAGIC = b"\x1f\x8b"
MAX_DECOMPRESSED_BYTES = 4 * DEFAULT_MAX_BODY_BYTES  # a limit, since a few bytes may decompress to gigabytes

TYPES = {
    TopicType.NORMAL: definition.MessageType.NORMAL,
    TopicType.FIFO: definition.MessageType.FIFO,
    TopicType.DELAY: definition.MessageType.DELAY,
    TopicType.TRANSACTION: definition.MessageType.TRANSACTION,
}

# Names of properties that the server adds.
SERVER_PROPERTY = re.compile(r"[A-Z_%]|1ST_POP_TIME$")


def half_id(message_id: str) -> str:
    """Return a new half id. A message that is sent again gets another half message, so the message id alone is not unique."""
    return f"{message_id}{HALF_MARK}{uuid4().hex[:12]}"


def to_proto(message: Outgoing, kind: TopicType, wire_id: str, topic: Any, *, now: float, compress_above: int | None) -> Any:
    """
    Return a message for the proxy. Its RocketMQ keys are the message id and the key, so that it can be found by either.

    Args:
        wire_id: the id that RocketMQ stores: the message id, or the half id of a half message.
        now: the current time, in seconds since 1970.
        compress_above: compress bodies of more bytes; None: never.
    """
    body, encoding = _compress(message.body, compress_above)
    system = definition.SystemProperties(
        message_id=wire_id,
        message_type=TYPES[kind],
        keys=[message.message_id, *([message.key] if PLAIN_KEY.fullmatch(message.key) else [])],
        body_encoding=encoding,
        born_host="outbox",
    )
    system.born_timestamp.FromMilliseconds(born_at(kind, now))
    if message.tag:
        system.tag = message.tag
    if kind is TopicType.FIFO:
        system.message_group = group_of(message.key)
    if kind is TopicType.DELAY:
        due_at = message.deliver_at.timestamp() if message.deliver_at else 0
        system.delivery_timestamp.FromMilliseconds(round(max(due_at, now) * 1000))
    return definition.Message(topic=topic, system_properties=system, user_properties=_properties(message), body=body)


def to_remoting(
    message: Outgoing, kind: TopicType, wire_id: str, *, now: float, compress_above: int | None
) -> tuple[dict[str, str], bytes, int]:
    """Return properties, body and system flag of a message for the remoting protocol. The arguments are those of `to_proto`."""
    is_half = kind is TopicType.TRANSACTION
    body, encoding = _compress(message.body, compress_above)
    key = message.key
    properties = _properties(message)
    properties["UNIQ_KEY"] = wire_id
    properties["KEYS"] = f"{message.message_id} {key}" if PLAIN_KEY.fullmatch(key) else message.message_id
    if message.tag:
        properties["TAGS"] = message.tag
    properties["PGROUP"] = message.topic  # the producer group that receives check-backs; a proxy also sets the topic
    properties["__BORNHOST"] = "outbox"
    properties["BORN_TIMESTAMP"] = str(born_at(kind, now))
    if is_half:
        properties["TRAN_MSG"] = "true"
    flag = COMPRESSED if encoding == definition.Encoding.GZIP else 0
    return properties, body, flag | HALF if is_half else flag


def born_at(kind: TopicType, now: float) -> int:
    """Return the born time of a message, in milliseconds since 1970."""
    return round((now - (BORN_EARLIER_SECONDS if kind is TopicType.TRANSACTION else 0)) * 1000)


def group_of(key: str) -> str:
    """Return the message group of a key: the key itself, or a digest of it if RocketMQ would not accept the key."""
    if PLAIN_KEY.fullmatch(key) and len(key.encode()) <= MAX_GROUP_BYTES:
        return key
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _compress(body: bytes, above: int | None) -> tuple[bytes, int]:
    """Return the body to send, and its encoding."""
    if above is not None and len(body) > above:
        smaller = zlib.compress(body, COMPRESSION_LEVEL)
        if len(smaller) < len(body):
            return smaller, definition.Encoding.GZIP
    return body, definition.Encoding.IDENTITY


def _decompress(body: bytes, headers: dict[str, str]) -> bytes:
    """Return a decompressed body. If it cannot be decompressed, return it unchanged, and add a header that says why."""
    stream = zlib.decompressobj(zlib.MAX_WBITS | 16 if body.startswith(GZIP_MAGIC) else zlib.MAX_WBITS)
    reason = f"it is cut off, or decompresses to more than {MAX_DECOMPRESSED_BYTES} bytes"
    try:
        decompressed = stream.decompress(body, MAX_DECOMPRESSED_BYTES)
        if stream.eof:
            return decompressed
    except zlib.error as error:
        reason = f"it is neither gzip nor zlib: {error}"
    headers[Header.UNREADABLE] = f"Its body of {len(body)} bytes is marked as compressed, but {reason}."
    return body


@lru_cache(1024)  # most messages have the same few names
def _is_plain_name(name: str) -> bool:
    return bool(PLAIN_NAME.fullmatch(name)) and not name.startswith("outbox-")


def _is_plain_value(value: str) -> bool:
    if value.isascii():
        return value != "" and value.isprintable()  # for ASCII equivalent to the pattern, and faster
    return bool(PLAIN_VALUE.fullmatch(value))


def _properties(message: Outgoing) -> dict[str, str]:
    plain: dict[str, str] = {}
    other: dict[str, str] = {}
    for name, value in message.headers.items():
        (plain if _is_plain_name(name) and _is_plain_value(value) else other)[name] = value
    if message.key and message.headers.get(Header.SUBJECT) != message.key:
        other[KEY] = message.key
    if message.token and message.headers.get(Header.TOKEN) != message.token:
        plain[TOKEN] = message.token
    if other:
        plain[HEADERS] = msgspec.json.encode(other).decode()
    return plain


def to_delivery(message: Any, group: str) -> Delivery:
    """Convert a message that was received from a proxy."""
    headers, key, _ = _read(message.user_properties)
    system = message.system_properties
    body = _body(message, headers)
    broker = "".join(system.receipt_handle.split(" ")[5:6])  # the sixth field of a receipt
    return Delivery(
        group=group,
        topic=message.topic.name,
        message_id=_message_id(system.message_id, headers),
        body=body,
        receipt=system.receipt_handle,
        key=key,
        tag=system.tag,
        headers=headers,
        delivery_count=_count(system.delivery_attempt),
        stored_at=_time(system.store_timestamp),
        queue=f"{broker}/{system.queue_id}",  # unique in the cluster
        pos=system.queue_offset,
    )


def stored_delivery(stored: StoredMessage, *, group: str, topic: str, receipt: str, dead_letter_reason: str) -> Delivery:
    """Convert a message that was read from a broker's log."""
    headers, key, _ = _read(stored.properties)
    body = _decompress(stored.body, headers) if stored.flag & COMPRESSED else stored.body
    return Delivery(
        group=group,
        topic=topic,
        message_id=_message_id(stored.properties.get("UNIQ_KEY", ""), headers),
        body=body,
        receipt=receipt,
        key=key,
        tag=stored.properties.get("TAGS", ""),
        headers=headers,
        delivery_count=_count(stored.retries),
        stored_at=stored.stored_at,
        queue=stored.topic,
        pos=stored.log_offset,
        dead_letter_reason=dead_letter_reason,
    )


def clock_ahead(message: Any) -> float:
    """Return by how many seconds the sender's clock was ahead of the broker's; negative if it was behind."""
    system = message.system_properties
    stored_after_seconds: float = (system.store_timestamp.ToMilliseconds() - system.born_timestamp.ToMilliseconds()) / 1000
    return BORN_EARLIER_SECONDS - stored_after_seconds


def to_half(message: Any) -> Half:
    """Return the half message that a check-back is about."""
    headers, key, token = _read(message.user_properties)
    system = message.system_properties
    return Half(
        topic=message.topic.name,
        message_id=_message_id(system.message_id, headers),
        half_id=system.message_id,
        token=token,
        asked=int(message.user_properties.get("TRANSACTION_CHECK_TIMES", "1")),
        born_at=_time(system.born_timestamp),
        key=key,
        headers=headers,
        body=_body(message, headers),
    )


def _body(message: Any, headers: dict[str, str]) -> bytes:
    body: bytes = message.body
    return _decompress(body, headers) if message.system_properties.body_encoding == definition.Encoding.GZIP else body


def _read(properties: Mapping[str, str]) -> tuple[dict[str, str], str, str]:
    """Return headers, key and token."""
    headers = {name: value for name, value in properties.items() if not SERVER_PROPERTY.match(name)}
    token = headers.pop(TOKEN, "") or headers.get(Header.TOKEN, "")
    with suppress(msgspec.DecodeError):  # a header of another producer may have this name; leave it unchanged
        headers |= _headers.decode(headers.get(HEADERS, "{}"))
        headers.pop(HEADERS, None)
    key = headers.pop(KEY, "") or headers.get(Header.SUBJECT, "")
    return headers, key, token


def _message_id(wire_id: str, headers: Mapping[str, str]) -> str:
    """Return the id of a message; "" if its body is unreadable, which makes it a dead letter."""
    return "" if Header.UNREADABLE in headers else headers.get(Header.ID) or wire_id.partition(HALF_MARK)[0]


def _count(deliveries: int) -> int:
    """Return a number of deliveries, which another producer may have set to any number."""
    return min(max(1, deliveries), MAX_DELIVERY_COUNT)


def _time(stamp: Any) -> datetime | None:
    return datetime.fromtimestamp(stamp.ToMilliseconds() / 1000, UTC) if stamp.seconds else None

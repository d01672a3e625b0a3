"""Our messages as RocketMQ's, and back."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from uuid import uuid4

import msgspec

from outbox.brokers.base import Delivery, Outgoing
from outbox.brokers.rocketmq.remoting.frames import COMPRESSED, HALF
from outbox.brokers.rocketmq.stubs import definition
from outbox.logs import get_logger
from outbox.message import Half, Header, TopicType

logger = get_logger(__name__)

# Properties of ours beside the headers, each only where it is needed.
KEY, TOKEN, HEADERS = "outbox-key", "outbox-token", "outbox-headers"

# The group that a replayed dead letter is for; the others pass it over.
ADDRESSEE = "outbox-replayed-for"

# Between a message's id and what tells one physical half message of it from the next.
HALF_MARK = "."

# What RocketMQ carries as a property as it is: no name of its own (they are in capitals), no control characters.
PLAIN_NAME = re.compile(r"[a-z][a-z0-9._-]*")
PLAIN_VALUE = re.compile(r"[^\x00-\x1f\x7f]+")
PLAIN_KEY = re.compile(r"[^\x00-\x20\x7f]+")  # it joins keys by blanks
MOST_GROUP_BYTES = 63

# The server begins to ask about a half message when it is transactionTimeOut old by this time, and asks at once when
# the time lies ahead of its own clock. A second earlier, clocks may differ by a second either way.
BORN_EARLIER_SECONDS = 1.0

# The server knows one flag for "compressed". Clients tell the kinds apart by their first bytes, and RocketMQ 4's, like the
# one for C++, take zlib for granted.
COMPRESSION_LEVEL = 5
GZIP_BEGINS = b"\x1f\x8b"

TYPES = {
    TopicType.NORMAL: definition.MessageType.NORMAL,
    TopicType.FIFO: definition.MessageType.FIFO,
    TopicType.DELAY: definition.MessageType.DELAY,
    TopicType.TRANSACTION: definition.MessageType.TRANSACTION,
}

# Added to properties by the server.
THEIRS = re.compile(r"[A-Z_%]|__")


def half_id(message_id: str) -> str:
    """Return an id for one physical half message."""
    return f"{message_id}{HALF_MARK}{uuid4().hex[:12]}"


def seal(message: Outgoing, kind: TopicType, wire_id: str, topic: Any, *, now: float, compress_above: int | None) -> Any:
    """
    Make RocketMQ's message. Its keys are our id and our key, so that each finds it.

    Args:
        now: seconds since 1970.
        compress_above: bytes of the body; None: never.
    """
    body, encoding = _packed(message.body, compress_above)
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


def seal_for_port(
    message: Outgoing, kind: TopicType, wire_id: str, *, now: float, compress_above: int | None
) -> tuple[dict[str, str], bytes, int]:
    """Return the properties, the body and the system flag by which a broker's own port takes a message; else as `seal`."""
    is_half = kind is TopicType.TRANSACTION
    body, encoding = _packed(message.body, compress_above)
    key = message.key
    properties = _properties(message)
    properties["UNIQ_KEY"] = wire_id
    properties["KEYS"] = f"{message.message_id} {key}" if PLAIN_KEY.fullmatch(key) else message.message_id
    if message.tag:
        properties["TAGS"] = message.tag
    properties["PGROUP"] = message.topic  # whom the server asks; a proxy sets the same
    properties["__BORNHOST"] = "outbox"
    properties["BORN_TIMESTAMP"] = str(born_at(kind, now))
    if is_half:
        properties["TRAN_MSG"] = "true"
    flag = COMPRESSED if encoding == definition.Encoding.GZIP else 0
    return properties, body, flag | HALF if is_half else flag


def born_at(kind: TopicType, now: float) -> int:
    """Return the time by which the server is to ask about a message, in milliseconds."""
    return round((now - (BORN_EARLIER_SECONDS if kind is TopicType.TRANSACTION else 0)) * 1000)


def group_of(key: str) -> str:
    """Return the message group of a key: the key itself, or a digest where RocketMQ would not take it."""
    if PLAIN_KEY.fullmatch(key) and len(key.encode()) <= MOST_GROUP_BYTES:
        return key
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _packed(body: bytes, above: int | None) -> tuple[bytes, int]:
    """Return a body as it travels, and its encoding."""
    if above is not None and len(body) > above:
        smaller = zlib.compress(body, COMPRESSION_LEVEL)
        if len(smaller) < len(body):
            return smaller, definition.Encoding.GZIP
    return body, definition.Encoding.IDENTITY


def unpacked(body: bytes) -> bytes:
    """Return a compressed body as it was; as it is where this cannot be told, so that a handler refuses it."""
    kind = zlib.MAX_WBITS | 16 if body.startswith(GZIP_BEGINS) else zlib.MAX_WBITS
    try:
        return zlib.decompress(body, kind)
    except zlib.error as error:
        logger.error("A body of %s bytes, marked as compressed, is neither gzip nor zlib: %s", len(body), error)
        return body


@lru_cache(1024)  # every message has the same few names
def _is_plain_name(name: str) -> bool:
    return bool(PLAIN_NAME.fullmatch(name)) and not name.startswith("outbox-")


def _is_plain_value(value: str) -> bool:
    if value.isascii():
        return value != "" and value.isprintable()  # the same, sooner said
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


def open_delivery(message: Any, group: str) -> Delivery:
    """Read a message that was received."""
    headers, key, _ = _read(message.user_properties)
    system = message.system_properties
    return Delivery(
        group=group,
        topic=message.topic.name,
        message_id=_our_id(system.message_id, headers),
        body=_body(message),
        receipt=system.receipt_handle,
        key=key,
        tag=system.tag,
        headers=headers,
        attempt=system.delivery_attempt or 1,
        stored_at=_time(system.store_timestamp),
        queue=_queue(system),
        pos=system.queue_offset,
    )


def _queue(system: Any) -> str:
    """Name a queue among those of all brokers: its broker, the sixth part of a receipt, and its number there."""
    broker = "".join(system.receipt_handle.split(" ")[5:6])
    return f"{broker}/{system.queue_id}"


def is_for(message: Any, group: str) -> bool:
    """Whether a group shall see a message that was received."""
    return bool(message.user_properties.get(ADDRESSEE, group) == group)


def message_id_of(properties: Mapping[str, str]) -> str:
    """Return the id of a message as a broker's log holds it."""
    return _our_id(properties.get("UNIQ_KEY", ""), _read(properties)[0])


def clock_ahead(message: Any) -> float:
    """Return by how many seconds the clock of whoever sent a half message was ahead of the broker's; below 0: behind it."""
    system = message.system_properties
    stored_after: float = (system.store_timestamp.ToMilliseconds() - system.born_timestamp.ToMilliseconds()) / 1000
    return BORN_EARLIER_SECONDS - stored_after


def open_half(message: Any) -> Half:
    """Read a half message that the server asks about."""
    headers, key, token = _read(message.user_properties)
    system = message.system_properties
    return Half(
        topic=message.topic.name,
        message_id=_our_id(system.message_id, headers),
        half_id=system.message_id,
        token=token,
        asked=int(message.user_properties.get("TRANSACTION_CHECK_TIMES", "1")),
        born_at=_time(system.born_timestamp),
        key=key,
        headers=headers,
        body=_body(message),
    )


def _body(message: Any) -> bytes:
    body: bytes = message.body
    return unpacked(body) if message.system_properties.body_encoding == definition.Encoding.GZIP else body


def _read(properties: Mapping[str, str]) -> tuple[dict[str, str], str, str]:
    """Return headers, key and token."""
    headers = {name: value for name, value in properties.items() if not THEIRS.match(name)}
    headers.pop(ADDRESSEE, None)
    token = headers.pop(TOKEN, "") or headers.get(Header.TOKEN, "")
    if HEADERS in headers:
        headers |= msgspec.json.decode(headers.pop(HEADERS), type=dict[str, str])
    key = headers.pop(KEY, "") or headers.get(Header.SUBJECT, "")
    return headers, key, token


def _our_id(wire_id: str, headers: Mapping[str, str]) -> str:
    return headers.get(Header.ID) or wire_id.partition(HALF_MARK)[0]


def _time(stamp: Any) -> datetime | None:
    return datetime.fromtimestamp(stamp.ToMilliseconds() / 1000, UTC) if stamp.seconds else None

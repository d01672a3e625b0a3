"""
Encoding of requests, and decoding of answers and stored messages.

Source: apache/rocketmq RemotingCommand (frame), MessageDecoder (stored messages).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

HEADER_BYTES = 8  # two lengths of four bytes: of the rest of the frame, and of the head in it
HEAD_SIZE = 0xFFFFFF  # mask of the second length, whose highest byte is the format of the head: 0 for JSON

IS_ANSWER = 0x1  # flag of a frame

# System flags of a message.
COMPRESSED = 0x1
HALF = 0x1 << 2
IPV6_BORN, IPV6_STORED = 0x1 << 4, 0x1 << 5  # the address of the sender, or of the broker, has 16 bytes

LONG_TOPIC = b"\xda\xa3\x20\xab"  # the magic number of messages whose topic has a long name
MAGIC = (b"\xda\xa3\x20\xa7", LONG_TOPIC)


class RemotingError(Exception):
    """Raised if a broker or name server answers with an error; `code` is RocketMQ's ResponseCode."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Request(msgspec.Struct, frozen=True):
    """A request to a broker or name server. The values of `fields` are str, int or bool."""

    code: int
    fields: Mapping[str, Any] = msgspec.field(default_factory=dict)
    body: bytes = b""


class RemotingAnswer(msgspec.Struct, frozen=True):
    """The answer to a request. `code` is 0, or the code of an error."""

    code: int
    text: str
    fields: Mapping[str, str]
    body: bytes

    def checked(self) -> RemotingAnswer:
        """Return this answer. Raises RemotingError if it is an error."""
        if self.code:
            raise RemotingError(self.code, self.text)
        return self


class StoredMessage(msgspec.Struct, frozen=True):
    """
    A message in a broker's log.

    Args:
        id: the id that RocketMQ's tools show: the broker's address and the log offset.
        queue_offset: the offset in its queue.
        log_offset: the offset in the broker's log.
        retries: the number of redeliveries.
    """

    id: str
    topic: str
    queue: int
    properties: Mapping[str, str]
    flag: int
    retries: int
    stored_at: datetime
    body: bytes
    queue_offset: int = 0
    log_offset: int = 0


class _Head(msgspec.Struct):
    code: int
    opaque: int
    flag: int
    remark: str | None = None
    ext_fields: dict[str, str] | None = msgspec.field(name="extFields", default=None)


_read_head = msgspec.json.Decoder(_Head).decode
_write = msgspec.json.Encoder().encode


def encode(request: Request, opaque: int, keys: tuple[str, str] = ("", "")) -> bytes:
    """
    Return the frame of a request.

    Args:
        opaque: the number of the request, which the answer repeats.
        keys: access key and secret key to sign the request with; empty: do not sign. Source: apache/rocketmq AclClientRPCHook.
    """
    access_key, secret_key = keys
    fields = {name: _text(value) for name, value in request.fields.items()}
    if access_key:
        fields["AccessKey"] = access_key
        signed = "".join(fields[name] for name in sorted(fields)).encode() + request.body
        fields["Signature"] = base64.b64encode(hmac.digest(secret_key.encode(), signed, hashlib.sha1)).decode()
    head = _write(
        {
            "code": request.code,
            "language": "PYTHON",
            "version": 477,
            "opaque": opaque,
            "flag": 0,
            "extFields": fields,
            "serializeTypeCurrentRPC": "JSON",
        }
    )
    return struct.pack(">ii", 4 + len(head) + len(request.body), len(head)) + head + request.body


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def frame_size(data: bytes | bytearray, at: int = 0) -> int | None:
    """Return the size of the frame that begins at an offset of the received data. None: the header is incomplete."""
    if len(data) - at < HEADER_BYTES:
        return None
    size: int = struct.unpack_from(">i", data, at)[0]
    return 4 + size


def decode(frame: bytes) -> tuple[int, RemotingAnswer | None]:
    """Return the number of a request and the answer; None instead of the answer if the frame is a request from the broker."""
    size = struct.unpack_from(">i", frame, 4)[0] & HEAD_SIZE
    head = _read_head(frame[HEADER_BYTES : HEADER_BYTES + size])
    if not head.flag & IS_ANSWER:
        return head.opaque, None
    return head.opaque, RemotingAnswer(head.code, head.remark or "", head.ext_fields or {}, frame[HEADER_BYTES + size :])


def stored_messages(data: bytes) -> Iterator[StoredMessage]:
    """Yield the messages in the body of a broker's answer, where they are concatenated as in the broker's log."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        yield stored_message(data[at : at + size])
        at += size


def stored_message(data: bytes) -> StoredMessage:
    """Decode one message. Raises ValueError if the data is not a message."""
    if data[4:8] not in MAGIC:
        raise ValueError("The data does not begin with a message.")
    # size, magic, crc, queue, flag: 4 each; queue offset, log offset: 8; system flag: 4; born time: 8; born host
    (queue,) = struct.unpack_from(">i", data, 12)
    queue_offset, log_offset, flag = struct.unpack_from(">qqi", data, 20)
    at = 48 + (20 if flag & IPV6_BORN else 8)
    (stored_at,) = struct.unpack_from(">q", data, at)
    at += 8
    host = data[at : at + (20 if flag & IPV6_STORED else 8)]
    at += len(host)
    (retries,) = struct.unpack_from(">i", data, at)
    at += 4 + 8  # offset of the half message
    (body_size,) = struct.unpack_from(">i", data, at)
    at += 4
    body = data[at : at + body_size]
    at += body_size
    if data[4:8] == LONG_TOPIC:
        (topic_size,) = struct.unpack_from(">h", data, at)
        at += 2
    else:
        topic_size = data[at]
        at += 1
    topic = data[at : at + topic_size].decode(errors="replace")
    at += topic_size
    (properties_size,) = struct.unpack_from(">h", data, at)
    properties = read_properties(data[at + 2 : at + 2 + properties_size].decode(errors="replace"))
    message_id = (host + data[28:36]).hex().upper()
    stored_time = datetime.fromtimestamp(stored_at / 1000, UTC)
    return StoredMessage(message_id, topic, queue, properties, flag, retries, stored_time, body, queue_offset, log_offset)


def read_properties(text: str) -> dict[str, str]:
    """Parse properties in the format of a broker's log."""
    return dict(pair.split("\x01", 1) for pair in text.split("\x02") if "\x01" in pair)


def write_properties(properties: Mapping[str, str]) -> str:
    """Format properties as in a broker's log."""
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])

"""
RocketMQ's remoting protocol: what its gRPC does not offer, asked of the broker's own port.

Source: apache/rocketmq RemotingCommand (frame), RequestCode (numbers), MessageDecoder (stored messages).
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

QUERY_MESSAGE = 12
GET_CONSUME_STATS = 208
TOPICS_OF_GROUP = 343

NOTHING_FOUND = 22
NO_SUCH_GROUP = 26
NO_SUCH_TOPIC = 17

TRANSACTION_BITS = 0x3 << 2
HALF, ROLLED_BACK = 0x1 << 2, 0x3 << 2

IPV6_BORN, IPV6_STORED = 0x1 << 4, 0x1 << 5


class RemotingError(Exception):
    """Raised when a broker or name server answers with an error; `code` is its ResponseCode."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as the broker's log holds it."""

    topic: str
    properties: Mapping[str, str]
    flag: int
    stored_at: datetime


def call(
    address: tuple[str, int], code: int, fields: Mapping[str, Any] | None = None, body: bytes = b"", *, timeout: float = 5
) -> bytes:
    """
    Make one request over a connection of its own; give the answer's body.

    Raises:
        OSError: nobody answers there.
        RemotingError: the answer is an error.
    """
    head = json.dumps(
        {
            "code": code,
            "language": "PYTHON",
            "version": 477,
            "opaque": 1,
            "flag": 0,
            "extFields": dict(fields or {}),
            "serializeTypeCurrentRPC": "JSON",
        }
    ).encode()
    with socket.create_connection(address, timeout) as connection:
        connection.sendall(struct.pack(">ii", 4 + len(head) + len(body), len(head)) + head + body)
        with connection.makefile("rb") as stream:
            total, size = struct.unpack(">ii", _read(stream, 8))
            size &= 0xFFFFFF
            answer = json.loads(_read(stream, size))
            data = _read(stream, total - 4 - size)
    if answer["code"]:
        raise RemotingError(answer["code"], answer.get("remark") or "")
    return data


def _read(stream: Any, size: int) -> bytes:
    data: bytes = stream.read(size)
    if len(data) != size:
        raise ConnectionError("The connection was closed in the middle of an answer.")
    return data


def stored_messages(data: bytes) -> Iterator[Stored]:
    """Read messages one behind the other, as a broker stores and answers them."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        yield _stored(data[at : at + size])
        at += size


def _stored(data: bytes) -> Stored:
    # size, magic, crc, queue, flag: 4 each; queue offset, log offset: 8; system flag: 4; born time: 8; born host
    (flag,) = struct.unpack_from(">i", data, 36)
    at = 48 + (20 if flag & IPV6_BORN else 8)
    (stored_at,) = struct.unpack_from(">q", data, at)
    at += 8 + (20 if flag & IPV6_STORED else 8) + 4 + 8  # stored host, times consumed, offset of the half message
    (body_size,) = struct.unpack_from(">i", data, at)
    at += 4 + body_size
    if data[4:8] == b"\xda\xa3\x20\xab":  # the magic number of messages whose topic has a long name
        (topic_size,) = struct.unpack_from(">h", data, at)
        at += 2
    else:
        topic_size = data[at]
        at += 1
    topic = data[at : at + topic_size].decode()
    at += topic_size
    (properties_size,) = struct.unpack_from(">h", data, at)
    properties = data[at + 2 : at + 2 + properties_size].decode()
    pairs = dict(pair.split("\x01", 1) for pair in properties.split("\x02") if "\x01" in pair)
    return Stored(topic, pairs, flag, datetime.fromtimestamp(stored_at / 1000, UTC))

"""
RocketMQ's remoting protocol: what its gRPC does not offer, asked of the broker's own port.

Source: apache/rocketmq RemotingCommand (frame), RequestCode (numbers), MessageDecoder (stored messages).
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

SEND_MESSAGE = 10
PULL_MESSAGE = 11
QUERY_MESSAGE = 12
GET_ALL_TOPICS = 21
VIEW_MESSAGE = 33
GET_CONSUME_STATS = 208
TOPICS_OF_GROUP = 343

NOTHING_MORE = 19
AGAIN = 20
ELSEWHERE = 21
NOTHING_FOUND = 22
NO_SUCH_GROUP = 26
NO_SUCH_TOPIC = 17

READER = "TOOLS_CONSUMER"  # a group that every broker has, for tools that only look
BY_TAG = 0x1 << 2  # flag of a pull that says itself what it wants
AT_ONCE = 32

TRANSACTION_BITS = 0x3 << 2
HALF, ROLLED_BACK = 0x1 << 2, 0x3 << 2

COMPRESSION = 0x1 | 0x7 << 8

IPV6_BORN, IPV6_STORED = 0x1 << 4, 0x1 << 5


class RemotingError(Exception):
    """Raised when a broker or name server answers with an error; `code` is its ResponseCode."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Stored:
    """
    A message as the broker's log holds it.

    Args:
        id: where it is, as RocketMQ's tools write it: the broker's address and the place in its log.
        retries: how often it was handed out again.
    """

    id: str
    topic: str
    queue: int
    properties: Mapping[str, str]
    flag: int
    retries: int
    stored_at: datetime
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, whatever its code says."""

    code: int
    text: str
    fields: Mapping[str, str]
    body: bytes


def call(
    address: tuple[str, int], code: int, fields: Mapping[str, Any] | None = None, body: bytes = b"", *, timeout: float = 5
) -> bytes:
    """
    Make one request over a connection of its own; give the answer's body.

    Raises:
        OSError: nobody answers there.
        RemotingError: the answer is an error.
    """
    answer = exchange(address, code, fields, body, timeout=timeout)
    if answer.code:
        raise RemotingError(answer.code, answer.text)
    return answer.body


def exchange(
    address: tuple[str, int], code: int, fields: Mapping[str, Any] | None = None, body: bytes = b"", *, timeout: float = 5
) -> Answer:
    """Make one request over a connection of its own; give the answer. Raises OSError where nobody answers."""
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
    return Answer(answer["code"], answer.get("remark") or "", answer.get("extFields") or {}, data)


def _read(stream: Any, size: int) -> bytes:
    data: bytes = stream.read(size)
    if len(data) != size:
        raise ConnectionError("The connection was closed in the middle of an answer.")
    return data


def query(address: tuple[str, int], topic: str, key: str) -> list[Stored]:
    """Find the messages of a topic that have a key, 32 at most. Raises as `call`."""
    fields = {
        "topic": topic,
        "key": key,
        "maxNum": AT_ONCE,
        "beginTimestamp": 0,
        "endTimestamp": int(time.time() * 1000) + 24 * 3600 * 1000,
    }
    found = stored_messages(call(address, QUERY_MESSAGE, fields))
    return [one for one in found if key in one.properties.get("KEYS", "").split(" ")]  # the index knows hashes only


def view(address: tuple[str, int], place: int) -> Stored:
    """Read the message at a place of a broker's log; where no message begins, it raises or gives nonsense. Raises as `call`."""
    return _stored(call(address, VIEW_MESSAGE, {"offset": place}))


def pull(address: tuple[str, int], topic: str, offset: int, *, queue: int = 0) -> tuple[list[Stored], int]:
    """
    Read on in a queue of a topic, moving nobody's offset; give some messages and where to go on.

    Raises:
        OSError, RemotingError: as `call`.
    """
    fields = {
        "consumerGroup": READER,
        "topic": topic,
        "queueId": queue,
        "queueOffset": offset,
        "maxMsgNums": AT_ONCE,
        "sysFlag": BY_TAG,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "subVersion": 0,
    }
    answer = exchange(address, PULL_MESSAGE, fields)
    if answer.code not in (0, NOTHING_MORE, AGAIN, ELSEWHERE):
        raise RemotingError(answer.code, answer.text)
    return list(stored_messages(answer.body)), int(answer.fields["nextBeginOffset"])


def send(address: tuple[str, int], topic: str, queue: int, stored: Stored, properties: Mapping[str, str]) -> None:
    """Store a message's body once more, with these properties, in a queue (-1: any). Raises as `call`."""
    fields = {
        "producerGroup": READER,
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": queue,
        "sysFlag": stored.flag & COMPRESSION,
        "bornTimestamp": int(time.time() * 1000),
        "flag": 0,
        "properties": "".join(f"{name}\x01{value}\x02" for name, value in properties.items()),
        "reconsumeTimes": 0,
    }
    call(address, SEND_MESSAGE, fields, stored.body)


def stored_messages(data: bytes) -> Iterator[Stored]:
    """Read messages one behind the other, as a broker stores and answers them."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        yield _stored(data[at : at + size])
        at += size


def _stored(data: bytes) -> Stored:
    # size, magic, crc, queue, flag: 4 each; queue offset, log offset: 8; system flag: 4; born time: 8; born host
    (queue,) = struct.unpack_from(">i", data, 12)
    (flag,) = struct.unpack_from(">i", data, 36)
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
    place = (host + data[28:36]).hex().upper()
    return Stored(place, topic, queue, pairs, flag, retries, datetime.fromtimestamp(stored_at / 1000, UTC), body)

"""One request at a time to the remoting port of a RocketMQ broker or name server, for code without an event loop."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import (
    HEADER_BYTES,
    RemotingAnswer,
    Request,
    StoredMessage,
    decode,
    encode,
    frame_size,
)

Address = tuple[str, int]


def exchange(address: Address, request: Request, *, timeout: float = 5, keys: tuple[str, str] = ("", "")) -> RemotingAnswer:
    """
    Send one request over a new connection; return the answer.

    Args:
        keys: access key and secret key that sign the request.

    Raises:
        OSError: the server does not answer.
    """
    with socket.create_connection(address, timeout) as connection:
        connection.sendall(encode(request, 1, keys))
        with connection.makefile("rb") as stream:
            first = stream.read(HEADER_BYTES)
            size = frame_size(first)
            frame = first + stream.read(size - HEADER_BYTES) if size else b""
    answer = decode(frame)[1] if size and len(frame) == size else None
    if answer is None:
        raise ConnectionError("The connection was closed in the middle of an answer.")
    return answer


def call(
    address: Address,
    code: int,
    fields: Mapping[str, Any] | None = None,
    body: bytes = b"",
    *,
    keys: tuple[str, str] = ("", ""),
) -> bytes:
    """
    Send one request; return the answer's body.

    Raises:
        OSError: the server does not answer.
        RemotingError: the answer is an error.
    """
    return exchange(address, Request(code, fields or {}, body), keys=keys).checked().body


def query(address: Address, topic: str, key: str) -> list[StoredMessage]:
    """Find the messages of a topic that have a key. Raises the same errors as `call`."""
    return requests.found(exchange(address, requests.query(topic, key)), key)


def pull(address: Address, topic: str, offset: int, *, queue: int = 0) -> tuple[list[StoredMessage], int]:
    """Read a queue from an offset; return some messages and the next offset. Raises the same errors as `call`."""
    return requests.pulled(exchange(address, requests.pull(topic, queue, offset)))


def read_all(address: Address, topic: str, queues: int) -> Iterator[StoredMessage]:
    """Read all messages of a topic at a broker, including copies, queue by queue. Raises the same errors as `call`."""
    for queue in range(queues):
        offset, has_more = 0, True
        while has_more:
            messages, next_offset = pull(address, topic, offset, queue=queue)
            yield from messages
            has_more, offset = next_offset > offset, next_offset

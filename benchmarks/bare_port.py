"""The minimal client that sends half messages to a broker's own port and commits them: one socket, 64 requests in flight."""

from __future__ import annotations

import re
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

AHEAD = 64
NUMBER = re.compile(rb'"opaque":(-?\d+)')
PLACE = re.compile(rb'"msgId":"[0-9A-F]*([0-9A-F]{16})"')
OFFSET = re.compile(rb'"queueOffset":"(\d+)"')
CODE = re.compile(rb'"code":(\d+)')

HEAD = b'{"code":%d,"language":"PYTHON","version":477,"opaque":%d,"flag":0,"extFields":{%s},"serializeTypeCurrentRPC":"JSON"}'
SEND = (
    b'"a":"%(topic)s","b":"%(topic)s","c":"TBW102","d":"4","e":"-1","f":"%(flag)d","g":"%(now)d","h":"0","i":"%(properties)s",'
    b'"j":"0","k":"false","m":"false"'
)
END = (
    b'"topic":"%(topic)s","producerGroup":"%(topic)s","tranStateTableOffset":"%(queue)d","commitLogOffset":"%(log)d",'
    b'"commitOrRollback":"8","fromTransactionCheck":"false","msgId":"","transactionId":""'
)


@dataclass(frozen=True)
class Pace:
    """Messages per second, and this process's CPU time for each in µs."""

    per_second: float
    microseconds: float


def send_and_commit(address: tuple[str, int], topic: str, properties: dict[str, str], body: bytes, count: int) -> Pace:
    """Store half messages, and commit each as soon as its offset is known."""
    return _paced(address, topic, {**properties, "TRAN_MSG": "true"}, body, count, is_half=True)


def send(address: tuple[str, int], topic: str, properties: dict[str, str], body: bytes, count: int) -> Pace:
    """Send messages."""
    return _paced(address, topic, properties, body, count, is_half=False)


def _paced(address: tuple[str, int], topic: str, properties: dict[str, str], body: bytes, count: int, *, is_half: bool) -> Pace:
    with socket.create_connection(address, 10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began, cpu = time.perf_counter(), time.process_time()
        _run(connection, topic.encode(), _text(properties), body, count, is_half=is_half)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return Pace(count / seconds, cpu / count * 1e6)


def _run(connection: socket.socket, topic: bytes, properties: bytes, body: bytes, count: int, *, is_half: bool) -> None:
    begun = done = 0
    answers = _answers(connection)
    while done < count:
        out = []
        while begun < count and begun - done < AHEAD:
            begun += 1
            out.append(_half(begun, topic, properties, body, is_half=is_half))
        if out:
            connection.sendall(b"".join(out))
        number, head = next(answers)
        code = CODE.search(head)
        assert code is not None, head
        assert code[1] == b"0", head
        if number < 0 or not is_half:
            done += 1
            continue
        place, offset = PLACE.search(head), OFFSET.search(head)
        assert place is not None, head
        assert offset is not None, head
        fields = END % {b"topic": topic, b"queue": int(offset[1]), b"log": int(place[1], 16)}
        connection.sendall(_frame(37, -number, fields, b""))


def _half(number: int, topic: bytes, properties: bytes, body: bytes, *, is_half: bool) -> bytes:
    own = uuid.uuid4().hex.encode()
    text = properties + b"UNIQ_KEY\\u0001" + own + b"\\u0002KEYS\\u0001" + own + b"\\u0002"
    flag = 4 if is_half else 0
    fields = SEND % {b"topic": topic, b"flag": flag, b"now": time.time_ns() // 1_000_000, b"properties": text}
    return _frame(310, number, fields, body)


def _frame(code: int, number: int, fields: bytes, body: bytes) -> bytes:
    head = HEAD % (code, number, fields)
    return struct.pack(">ii", 4 + len(head) + len(body), len(head)) + head + body


def _text(properties: dict[str, str]) -> bytes:
    return b"".join(f"{name}\\u0001{value}\\u0002".encode() for name, value in properties.items())


def _answers(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    data = b""
    while True:
        while len(data) < 8 or len(data) < (size := 4 + struct.unpack_from(">i", data)[0]):
            more = connection.recv(1 << 16)
            assert more, "the broker closed the connection"
            data += more
        head = data[8 : 8 + (struct.unpack_from(">i", data, 4)[0] & 0xFFFFFF)]
        data = data[size:]
        found = NUMBER.search(head)
        assert found is not None
        yield int(found[1]), head

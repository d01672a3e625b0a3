"""Records that the client in Python cannot write, written to the socket of a node."""

import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outbox.brokers.options import read_address
from tests.kafka_node import server

PRODUCE = 0, 3  # the request, and the oldest version of it that Kafka 4 knows
SECONDS = 30


@dataclass(frozen=True, slots=True)
class Record:
    """A record, of which the server checks nothing but the lengths."""

    topic: str
    value: bytes | None = b"body"
    key: bytes | None = None
    headers: Sequence[tuple[bytes, bytes | None]] = ()
    timestamp: int | None = None  # milliseconds since 1970; by default now


def produce_raw(records: Iterable[Record]) -> None:
    """Store records in the first partitions of their topics, each in a batch of its own."""
    address = read_address(server().address)
    with socket.create_connection(address, SECONDS) as connection, connection.makefile("rb") as answers:
        for number, record in enumerate(records):
            connection.sendall(_request(number, record))
            (size,) = struct.unpack(">i", answers.read(4))
            (error,) = struct.unpack_from(">h", answers.read(size), 4 + 4 + 2 + len(record.topic.encode()) + 4 + 4)
            assert error == 0, (error, record)


def produce_with_header(topic: str, name: bytes) -> None:
    """Store a record with a header of any name."""
    produce_raw([Record(topic, headers=[(name, b"value")])])


def _request(number: int, record: Record) -> bytes:
    topic, batch = record.topic.encode(), _batch(record)
    head = struct.pack(">hhih", *PRODUCE, number, -1) + struct.pack(">hhi", -1, -1, SECONDS * 1000)
    place = struct.pack(">ih", 1, len(topic)) + topic + struct.pack(">ii", 1, 0)
    return _sized(head + place + _sized(batch))


def _batch(record: Record) -> bytes:
    """Return a batch of format 2."""
    at = int(time.time() * 1000) if record.timestamp is None else record.timestamp
    headers = b"".join(_field(name) + _field(value) for name, value in record.headers)
    fields = b"\0" + _varint(0) * 2 + _field(record.key) + _field(record.value) + _varint(len(record.headers)) + headers
    checked = struct.pack(">hiqqqhii", 0, 0, at, at, -1, -1, -1, 1) + _varint(len(fields)) + fields
    return struct.pack(">q", 0) + _sized(struct.pack(">ibI", -1, 2, _crc32c(checked)) + checked)


def _sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def _field(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def _varint(number: int) -> bytes:
    left, found = (number << 1) ^ (number >> 63), bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [_remainder(byte) for byte in range(256)]

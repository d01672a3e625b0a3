"""Messages that py-amqp does not write, written as frames to its socket."""

import struct
from collections.abc import Iterable

import amqp

METHOD, HEADER, BODY = 1, 2, 3
FRAME_BYTES = 100_000


def publish_bytes(
    channel: amqp.Channel, exchange: str, flags: int, properties: bytes, body: bytes, *, routing_key: bytes = b""
) -> None:
    """Publish a message whose properties are these bytes."""
    method = struct.pack(">HHH", 60, 40, 0) + short(exchange.encode()) + short(routing_key) + b"\0"
    header = struct.pack(">HHQH", 60, 0, len(body), flags) + properties
    bodies = [(BODY, body[at : at + FRAME_BYTES]) for at in range(0, len(body), FRAME_BYTES)]
    for kind, payload in [(METHOD, method), (HEADER, header), *bodies]:
        channel.connection.transport.write(struct.pack(">BHI", kind, channel.channel_id, len(payload)) + payload + b"\xce")


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def table(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a table; each value begins with its type."""
    return long(b"".join(short(name[:255]) + value for name, value in fields))


def long(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text

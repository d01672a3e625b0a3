"""
Makes frames readable in which another program's message has properties that py-amqp cannot read.

For a timestamp in milliseconds, or a property that is not UTF-8, py-amqp raises while it reads the frame. Then the connection
would be dropped, and the message delivered again, forever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amqp
from amqp import spec
from amqp.method_framing import frame_handler
from amqp.serialization import decode_properties_basic

from outbox.logs import get_logger, line_of
from outbox.message import Header

logger = get_logger(__name__)

Frame = tuple[int, int, bytes]  # type, channel, payload

METHOD, HEADER = 1, 2
HEADERS_FLAG = b"\x20\0"
MAX_SHOWN_BYTES = 1000
PROPERTIES_OFFSET = 12  # in a header frame, after class, weight and size of the body
DELIVER = b"".join(number.to_bytes(2, "big") for number in spec.Basic.Deliver)


def tolerant_frame_handler(connection: amqp.Connection, callback: Callable[..., Any]) -> Callable[[Frame], Any]:
    """Return py-amqp's reader of frames, changed: a header that says so replaces properties which py-amqp cannot read."""
    read = frame_handler(connection, callback)

    def read_frame(frame: Frame) -> Any:
        kind, channel, payload = frame
        if kind == METHOD and bytes(payload[:4]) == DELIVER:
            payload = _with_readable_key(bytes(payload))
        try:
            return read((kind, channel, payload))
        except Exception as error:
            if kind != HEADER or _can_be_read(payload):
                raise
            logger.warning(
                "A message from RabbitMQ is received without its properties, because they cannot be read: %s", line_of(error)
            )
            return read(
                (
                    kind,
                    channel,
                    bytes(payload[:PROPERTIES_OFFSET]) + _replacement_properties(bytes(payload[PROPERTIES_OFFSET:]), error),
                )
            )

    return read_frame


def _can_be_read(payload: bytes) -> bool:
    try:
        decode_properties_basic(payload, PROPERTIES_OFFSET)
    except Exception:
        return False
    return True


def _replacement_properties(properties: bytes, error: Exception) -> bytes:
    """Return properties with a single header, which has the error and the bytes of properties that cannot be read."""
    text = f"{line_of(error)}: {properties[:MAX_SHOWN_BYTES]!r}".encode()
    header = bytes([len(Header.UNREADABLE)]) + Header.UNREADABLE.encode() + b"S" + len(text).to_bytes(4, "big") + text
    return HEADERS_FLAG + len(header).to_bytes(4, "big") + header


def _with_readable_key(payload: bytes) -> bytes:
    """Return the payload of a delivery. If its routing key is not UTF-8, replace the key with one that is, and may be shorter."""
    offset = 4
    offset += 1 + payload[offset]  # skip the consumer tag
    offset += 9  # skip the delivery tag and the flag `redelivered`
    offset += 1 + payload[offset]  # skip the exchange
    try:
        payload[offset + 1 :].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        key = payload[offset + 1 :].decode("utf-8", "replace").encode()[:255].decode("utf-8", "ignore").encode()
        return payload[:offset] + bytes([len(key)]) + key
    return payload

"""
Frames that py-amqp cannot read: what other programs may put into a message, and the server passes on.

py-amqp raises while it reads the frame, for a timestamp in milliseconds or a property that is not UTF-8. Then the connection
would be dropped, and the message delivered again, for ever.
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
MOST_SHOWN = 1000
PROPERTIES_AT = 12  # in a header frame: behind class, weight and size of the body
DELIVER = b"".join(number.to_bytes(2, "big") for number in spec.Basic.Deliver)


def tolerant_frame_handler(connection: amqp.Connection, callback: Callable[..., Any]) -> Callable[[Frame], Any]:
    """Return py-amqp's reader of frames, which gives a message whose properties it cannot read a header that says so."""
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
            logger.warning("A message of RabbitMQ is received without its properties, which cannot be read: %s", line_of(error))
            return read(
                (kind, channel, bytes(payload[:PROPERTIES_AT]) + _properties_instead(bytes(payload[PROPERTIES_AT:]), error))
            )

    return read_frame


def _can_be_read(payload: bytes) -> bool:
    try:
        decode_properties_basic(payload, PROPERTIES_AT)
    except Exception:
        return False
    return True


def _properties_instead(properties: bytes, error: Exception) -> bytes:
    """Return properties with a single header: the error of those that cannot be read, and their bytes."""
    text = f"{line_of(error)}: {properties[:MOST_SHOWN]!r}".encode()
    header = bytes([len(Header.UNREADABLE)]) + Header.UNREADABLE.encode() + b"S" + len(text).to_bytes(4, "big") + text
    return HEADERS_FLAG + len(header).to_bytes(4, "big") + header


def _with_readable_key(payload: bytes) -> bytes:
    """Return a delivery whose routing key is UTF-8, cut where it would be too long."""
    at = 4
    at += 1 + payload[at]  # the consumer's tag
    at += 9  # the delivery's tag, and whether it is redelivered
    at += 1 + payload[at]  # the exchange
    try:
        payload[at + 1 :].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        key = payload[at + 1 :].decode("utf-8", "replace").encode()[:255].decode("utf-8", "ignore").encode()
        return payload[:at] + bytes([len(key)]) + key
    return payload

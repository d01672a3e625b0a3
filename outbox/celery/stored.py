"""
What the body of a message row holds of a task: the message of Celery's protocol, whole, with the place it goes to.

It is complete when the task is enqueued. A countdown is a time by then, the arguments are encoded, and the relay needs to know
neither the task nor its routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
from kombu.utils import json

from outbox.errors import InvalidMessage

TOPIC = "celery-tasks"

CONTENT_TYPE = "application/vnd.outbox.celery-task+json"

KOMBUS_TYPE = b'"__type__"'  # stands where kombu's JSON has written a time or a decimal; without one any reader will do

MAX_HEADER_BYTES = 100_000  # AMQP has them in one frame of 128 KiB, and the server closes the connection over a larger one
MAX_ROUTING_KEY_BYTES = 255  # AMQP's short string


class StoredTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    A task's message.

    Args:
        body: args, kwargs and what follows, where they are JSON in UTF-8: an operator can read them in the admin.
        encoded: the body otherwise, as bytes.
        headers, properties: as kombu's JSON writes them, which keeps times and decimals.
        queues: names of the queues of Celery's settings that must exist before it is sent.
    """

    task: str
    id: str
    content_type: str
    content_encoding: str
    headers: msgspec.Raw
    properties: msgspec.Raw
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    encoded: bytes = b""
    exchange: str = ""
    routing_key: str = ""
    queues: tuple[str, ...] = ()

    @property
    def payload(self) -> bytes:
        """The body as Celery encoded it."""
        return self.encoded if self.body is msgspec.UNSET else bytes(self.body)

    def read_headers(self) -> dict[str, Any]:
        """Return the headers of Celery's message."""
        return _load(self.headers)

    def read_properties(self, *, expires: object, now: datetime) -> dict[str, Any]:
        """Return the properties of the message; of its lifetime, what is left at a time. `expires`: as its headers say it."""
        properties = _load(self.properties)
        if "expiration" in properties and isinstance(expires, str):
            expires_at = datetime.fromisoformat(expires)
            left = (expires_at if expires_at.tzinfo else expires_at.replace(tzinfo=UTC)) - now
            properties["expiration"] = str(max(0, int(left.total_seconds() * 1000)))
        return properties


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(StoredTask)
_mapping = msgspec.json.Decoder(dict[str, Any])
_raw = msgspec.json.Decoder(msgspec.Raw)


def encode(
    payload: str | bytes,
    *,
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    content_type: str,
    content_encoding: str,
    exchange: str,
    routing_key: str,
    queues: Sequence[str],
) -> bytes:
    """
    Return the body of a message row for a task.

    Raises:
        InvalidMessage: no broker would take the routing key or the headers, or JSON cannot hold a header.
    """
    name = headers["task"]
    if len(routing_key.encode()) > MAX_ROUTING_KEY_BYTES:
        raise InvalidMessage(
            f"Task {name} has a routing key of more than {MAX_ROUTING_KEY_BYTES} bytes.", hint="Choose a shorter one."
        )
    written, others = _dump(name, "headers", headers), _dump(name, "properties", properties)
    if len(bytes(written)) + len(bytes(others)) > MAX_HEADER_BYTES:
        raise InvalidMessage(
            f"Task {name} has headers of more than {MAX_HEADER_BYTES} bytes, with its stamps.", hint="Use arguments for these."
        )
    body, encoded = _part(payload, content_type, content_encoding)
    return _encoder.encode(
        StoredTask(
            task=name,
            id=headers["id"],
            content_type=content_type,
            content_encoding=content_encoding,
            headers=written,
            properties=others,
            body=body,
            encoded=encoded,
            exchange=exchange,
            routing_key=routing_key,
            queues=tuple(queues),
        )
    )


def decode(body: bytes) -> StoredTask:
    """
    Return the task in the body of a message row.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return _decoder.decode(body)


def _part(payload: str | bytes, content_type: str, content_encoding: str) -> tuple[msgspec.Raw | msgspec.UnsetType, bytes]:
    raw = payload.encode() if isinstance(payload, str) else payload
    if (content_type, content_encoding) == ("application/json", "utf-8"):
        try:
            return msgspec.Raw(bytes(_raw.decode(raw))), b""
        except msgspec.MsgspecError:  # compressed; or NaN, which Python writes and JSON does not know
            pass
    return msgspec.UNSET, raw


def _dump(name: str, what: str, values: Mapping[str, Any]) -> msgspec.Raw:
    try:
        return msgspec.Raw(bytes(_raw.decode(json.dumps(dict(values)).encode())))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidMessage(
            f"Task {name} has {what} that cannot be written as JSON: {error}.", hint="Use plain values."
        ) from error


def _load(values: msgspec.Raw) -> dict[str, Any]:
    raw = bytes(values)
    if KOMBUS_TYPE not in raw:
        with suppress(msgspec.MsgspecError):  # a number that only Python's JSON reads
            return _mapping.decode(raw)
    return dict(json.loads(raw))


class TaskMessage(msgspec.Struct, frozen=True):
    """
    A task with its place in a batch.

    Args:
        number: its place among the messages of a send, from 0.
        message_id: that of its message row.
    """

    number: int
    message_id: str
    stored: StoredTask

    def prepare(self, channel: Any, **more: Any) -> Any:
        """Make the transport's message of it, with more properties."""
        stored, headers = self.stored, self.stored.read_headers()
        properties = stored.read_properties(expires=headers.get("expires"), now=datetime.now(UTC)) | more
        body: str | bytes = stored.payload
        if stored.content_encoding != "binary" and "compression" not in headers:
            body = stored.payload.decode(stored.content_encoding)
        return channel.prepare_message(
            body,
            priority=properties.pop("priority", 0),
            content_type=stored.content_type,
            content_encoding=stored.content_encoding,
            headers=headers,
            properties=properties,
        )

"""
The body of a task's message row: the whole message of Celery's protocol, with its exchange, routing key and queues.

The message is complete when the task is enqueued: a countdown has become a time, and the arguments are encoded. So the relay
needs to know neither the task nor its routes.
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

KOMBU_TYPE = b'"__type__"'  # kombu's JSON marks a time or a decimal with this; JSON without the mark is decoded by msgspec

MAX_HEADER_BYTES = 100_000  # AMQP sends headers in one frame of 128 KiB, and the server closes the connection if one is larger
MAX_ROUTING_KEY_BYTES = 255  # the limit of AMQP's short strings


class StoredTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    A task's message.

    Args:
        body: the message's body (args, kwargs, callbacks) if it is JSON in UTF-8, so that an operator can read it in the admin.
        encoded: the message's body in any other encoding, as bytes.
        headers, properties: as kombu's JSON writes them, which preserves times and decimals.
        queues: names of queues in Celery's settings that must exist before the message is sent.
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
        """The body as Celery has encoded it."""
        return self.encoded if self.body is msgspec.UNSET else bytes(self.body)

    def read_headers(self) -> dict[str, Any]:
        """Return the headers of the message."""
        return _load(self.headers)

    def read_properties(self, *, expires: object, now: datetime) -> dict[str, Any]:
        """
        Return the properties of the message, with the lifetime that remains at the time `now`.

        Args:
            expires: the message's header `expires`.
        """
        properties = _load(self.properties)
        if "expiration" in properties and isinstance(expires, str):
            expires_at = datetime.fromisoformat(expires)
            remaining = (expires_at if expires_at.tzinfo else expires_at.replace(tzinfo=UTC)) - now
            properties["expiration"] = str(max(0, int(remaining.total_seconds() * 1000)))
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
        InvalidMessage: the routing key or the headers are too large for a broker, or a header cannot be encoded as JSON.
    """
    name = headers["task"]
    if len(routing_key.encode()) > MAX_ROUTING_KEY_BYTES:
        raise InvalidMessage(
            f"Task {name} has a routing key of more than {MAX_ROUTING_KEY_BYTES} bytes.", hint="Choose a shorter one."
        )
    raw_headers, raw_properties = _dump(name, "headers", headers), _dump(name, "properties", properties)
    if len(bytes(raw_headers)) + len(bytes(raw_properties)) > MAX_HEADER_BYTES:
        raise InvalidMessage(
            f"Task {name} has headers and stamps of more than {MAX_HEADER_BYTES} bytes.", hint="Pass these values as arguments."
        )
    body, encoded = _body_or_encoded(payload, content_type, content_encoding)
    return _encoder.encode(
        StoredTask(
            task=name,
            id=headers["id"],
            content_type=content_type,
            content_encoding=content_encoding,
            headers=raw_headers,
            properties=raw_properties,
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
        msgspec.MsgspecError: the body is not a task.
    """
    return _decoder.decode(body)


def _body_or_encoded(
    payload: str | bytes, content_type: str, content_encoding: str
) -> tuple[msgspec.Raw | msgspec.UnsetType, bytes]:
    """Return the values of `StoredTask.body` and `StoredTask.encoded`, of which one is empty."""
    raw = payload.encode() if isinstance(payload, str) else payload
    if (content_type, content_encoding) == ("application/json", "utf-8"):
        try:
            return msgspec.Raw(bytes(_raw.decode(raw))), b""
        except msgspec.MsgspecError:  # the body is compressed, or has NaN, which Python writes although JSON has no NaN
            pass
    return msgspec.UNSET, raw


def _dump(name: str, label: str, values: Mapping[str, Any]) -> msgspec.Raw:
    try:
        return msgspec.Raw(bytes(_raw.decode(json.dumps(dict(values)).encode())))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidMessage(
            f"Task {name} has {label} that cannot be written as JSON: {error}.", hint="Use plain values."
        ) from error


def _load(values: msgspec.Raw) -> dict[str, Any]:
    raw = bytes(values)
    if KOMBU_TYPE not in raw:
        with suppress(msgspec.MsgspecError):  # the JSON has a number that only Python's json accepts
            return _mapping.decode(raw)
    return dict(json.loads(raw))


class TaskMessage(msgspec.Struct, frozen=True):
    """
    A task with its position in a send.

    Args:
        number: the position among the messages of the send, from 0.
        message_id: the id of the task's message row.
    """

    number: int
    message_id: str
    stored: StoredTask

    def prepare(self, channel: Any, **more: Any) -> Any:
        """Return the message in the form that a channel of kombu sends. `more`: additional properties."""
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

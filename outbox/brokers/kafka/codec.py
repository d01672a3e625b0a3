"""
Messages as Kafka's records, and records as deliveries.

Source: CloudEvents 1.0, Kafka protocol binding, binary mode. Attributes are headers with the prefix `ce_`; headers of the outbox
that are no attributes have their own names, like those of the publisher.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from operator import methodcaller
from typing import TYPE_CHECKING

from outbox.brokers.base import Delivery, Outgoing
from outbox.message import Header

if TYPE_CHECKING:
    from confluent_kafka import Message

CLOUDEVENTS, KAFKA = "ce-", "ce_"
ID, TAG = "outbox-id", "outbox-tag"  # only where the headers of a message do not say it
read_headers = methodcaller("headers")


def record_key(message: Outgoing) -> bytes | None:
    """Return the key of a message's record, which chooses the partition. None: any partition."""
    return message.key.encode() if message.key else None


def record_headers(message: Outgoing) -> list[tuple[str, bytes]]:
    """Return the headers of a message's record."""
    headers = [(record_header(name), value.encode()) for name, value in message.headers.items()]
    if message.message_id and message.headers.get(Header.ID) != message.message_id:
        headers.append((ID, message.message_id.encode()))
    if message.tag and message.headers.get(Header.TAG) != message.tag:
        headers.append((TAG, message.tag.encode()))
    return headers


def record_size(message: Outgoing) -> int:
    """Return the size of a message's record in bytes; Kafka adds at most some 100 bytes to it."""
    headers = sum(len(name) + len(value) + 4 for name, value in record_headers(message))
    return len(message.body) + len(record_key(message) or b"") + headers


def to_delivery(record: Message, *, group: str, receipt: str, delivery_count: int) -> Delivery:
    """
    Return the delivery of a record, of any producer.

    A record without an id is identified by its place. Its time is part of the id: a topic that was deleted and created again has
    other records at the same places. One whose headers cannot be read has no id at all.
    """
    headers = {_our_name(name): text_of(value) for name, value in _headers_of(record)}
    named = headers.pop(ID, "") or headers.get(Header.ID, "")
    tag = headers.pop(TAG, "") or headers.get(Header.TAG, "")
    topic, queue, pos, stored_at = record.topic() or "", str(record.partition()), record.offset(), record.timestamp()[1]
    return Delivery(
        group=group,
        topic=topic,
        message_id=named or ("" if Header.UNREADABLE in headers else f"{topic}/{queue}/{pos}@{stored_at}"),
        body=record.value() or b"",
        receipt=receipt,
        key=text_of(record.key()) or headers.get(Header.SUBJECT, ""),
        tag=tag,
        headers=headers,
        delivery_count=delivery_count,
        stored_at=_time_of(stored_at),
        queue=queue,
        pos=pos,
    )


def text_of(value: bytes | str | None) -> str:
    """Return a key or a header as text; bytes that are not text are escaped."""
    if value is None or isinstance(value, str):
        return value or ""
    return value.decode("utf-8", "backslashreplace")


def _headers_of(record: Message) -> list[tuple[str, bytes | None]]:
    """
    Return the headers of a record, or one that says why they cannot be read.

    For a name that is not UTF-8 the client returns a list that ends the process when it is read, beside an exception. A call by
    the interpreter may miss that (Python 3.11 and later specialize it), one by `methodcaller` raises SystemError.
    """
    try:
        return read_headers(record) or []
    except SystemError:
        record.set_headers([(Header.UNREADABLE, b"The name of a header is not UTF-8.")])
        return record.headers() or []


def _time_of(milliseconds: int) -> datetime | None:
    """Return a record's time; None for one that is none, as of a producer that writes microseconds."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds > 0 else None
    except (ValueError, OverflowError):
        return None


@lru_cache(maxsize=1000)
def record_header(header: str) -> str:
    """Return the name of a message's header in a record."""
    return KAFKA + header.removeprefix(CLOUDEVENTS) if header.startswith(CLOUDEVENTS) else header


@lru_cache(maxsize=1000)
def _our_name(header: str) -> str:
    return CLOUDEVENTS + header.removeprefix(KAFKA) if header.startswith(KAFKA) else header

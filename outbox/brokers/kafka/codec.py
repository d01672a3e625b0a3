"""
Messages as Kafka's records, and records as deliveries.

Source: CloudEvents 1.0, Kafka protocol binding, binary mode. CloudEvents attributes are record headers with the prefix `ce_`. All
other headers, of the outbox or the publisher, keep their names.
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
ID, TAG = "outbox-id", "outbox-tag"  # written only if no header of the message has the same value
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
    """Return the size of a message's record in bytes, without the overhead of at most about 100 bytes that Kafka adds."""
    headers = sum(len(name) + len(value) + 4 for name, value in record_headers(message))
    return len(message.body) + len(record_key(message) or b"") + headers


def to_delivery(record: Message, *, group: str, receipt: str, delivery_count: int) -> Delivery:
    """
    Return the delivery of a record, which may be from any producer.

    A record without an id is identified by its topic-partition and offset, and by its time, because a topic that was deleted and
    created again has other records at the same offsets. A record whose headers cannot be read has no id.
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
    """Return a key or a header as text; bytes that are not UTF-8 are escaped."""
    if value is None or isinstance(value, str):
        return value or ""
    return value.decode("utf-8", "backslashreplace")


def _headers_of(record: Message) -> list[tuple[str, bytes | None]]:
    """
    Return the headers of a record. If they cannot be read, return one header that says why.

    If a header's name is not UTF-8, the client sets an exception, but also returns a list, and a read of that list ends the
    process. A call in Python code may miss the exception (Python 3.11 and later specialize such calls). A call with
    `methodcaller` raises SystemError.
    """
    try:
        return read_headers(record) or []
    except SystemError:
        record.set_headers([(Header.UNREADABLE, b"The name of a header is not UTF-8.")])
        return record.headers() or []


def _time_of(milliseconds: int) -> datetime | None:
    """Return a record's time; None if it is out of range, for example because the producer writes microseconds."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds > 0 else None
    except (ValueError, OverflowError):
        return None


@lru_cache(maxsize=1000)
def record_header(header: str) -> str:
    """Return the name of a record's header for the name of a message's header."""
    return KAFKA + header.removeprefix(CLOUDEVENTS) if header.startswith(CLOUDEVENTS) else header


@lru_cache(maxsize=1000)
def _our_name(header: str) -> str:
    """Return the name of a message's header for the name of a record's header."""
    return CLOUDEVENTS + header.removeprefix(KAFKA) if header.startswith(KAFKA) else header

"""
Messages as Kafka's records, and records as deliveries.

Source: CloudEvents 1.0, Kafka protocol binding, binary mode. Attributes are headers with the prefix `ce_`; headers of the outbox
that are no attributes have their own names, like those of the publisher.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from outbox.brokers.base import Delivery, Outgoing
from outbox.message import Header, prepare

if TYPE_CHECKING:
    from confluent_kafka import Message

CLOUDEVENTS, KAFKA = "ce-", "ce_"
ID, TAG = "outbox-id", "outbox-tag"  # only where the headers of a message do not say it
NOTE = "outbox-copy"  # of a copy in a retry topic or among dead letters: JSON of a CopyNote
KEY = "outbox-key"  # the record's key, on dead letters, whose own keys are their ids

RecordHeaders = list[tuple[str, bytes | None]]


class CopyNote(msgspec.Struct, omit_defaults=True):
    """
    What the copy of a record keeps about it, in a retry topic or among the dead letters of a group.

    Args:
        group, topic: whose copy it is. The topics of two groups may have the same name, since both may contain dots.
        message_id: "": it is in the headers.
        queue, pos, stored_at: where the record is stored, and when it was (milliseconds since 1970).
        delivery_count: its deliveries before the copy was made.
        retry_at, step_at: on a retry topic, when the message is due, and when this step of its delay is over: seconds since 1970.
        reason, died_at: of a dead letter; seconds since 1970.
        is_null: the record had no value.
    """

    group: str
    topic: str
    message_id: str = ""
    queue: str = ""
    pos: int = 0
    stored_at: int = 0
    delivery_count: int = 0
    retry_at: float = 0.0
    step_at: float = 0.0
    reason: str = ""
    died_at: float = 0.0
    is_null: bool = False


def record_key(message: Outgoing) -> bytes | None:
    """Return the key of a message's record, which chooses the partition. None: any partition."""
    return message.key.encode() if message.key else None


def record_headers(message: Outgoing) -> list[tuple[str, bytes]]:
    """Return the headers of a message's record."""
    found = [(record_header(name), value.encode()) for name, value in message.headers.items()]
    if message.message_id and message.headers.get(Header.ID) != message.message_id:
        found.append((ID, message.message_id.encode()))
    if message.tag and message.headers.get(Header.TAG) != message.tag:
        found.append((TAG, message.tag.encode()))
    return found


def record_size(message: Outgoing) -> int:
    """Return the size of a message's record in bytes; Kafka adds at most some 100 bytes to it."""
    headers = sum(len(name) + len(value) + 4 for name, value in record_headers(message))
    return len(message.body) + len(record_key(message) or b"") + headers


def to_delivery(record: Message, *, group: str, topic: str, receipt: str = "", delivery_count: int = 1) -> Delivery:
    """
    Return the delivery of a record, of any producer.

    A record without an id is identified by its place. Its time is part of the id: a topic that was deleted and created again has
    other records at the same places.
    """
    headers = {_our_name(name): text_of(value) for name, value in record.headers() or []}
    note = read_note(record) if record.topic() != topic else None  # in its topic it is a header of another producer
    headers.pop(NOTE, None)
    named = headers.pop(ID, "")
    tag = headers.pop(TAG, "") or headers.get(Header.TAG, "")
    stored_at = note.stored_at if note else record.timestamp()[1]
    queue, pos = (note.queue, note.pos) if note else (str(record.partition()), record.offset())
    message_id = named or headers.get(Header.ID, "")
    return Delivery(
        group=group,
        topic=topic,
        message_id=message_id or (note.message_id if note else "") or f"{topic}/{queue}/{pos}@{stored_at}",
        body=record.value() or b"",
        receipt=receipt,
        key=text_of(record.key()) or headers.get(Header.SUBJECT, ""),
        tag=tag,
        headers=headers,
        delivery_count=delivery_count + (note.delivery_count if note else 0),
        stored_at=datetime.fromtimestamp(stored_at / 1000, UTC) if stored_at > 0 else None,
        queue=queue,
        pos=pos,
    )


def read_note(record: Message) -> CopyNote | None:
    """Return the note of a copy; None for any other record."""
    for name, value in record.headers() or []:
        if name == NOTE and value is not None:
            try:
                prepare(CopyNote)
                return msgspec.json.decode(value, type=CopyNote)
            except msgspec.DecodeError:
                return None
    return None


def headers_with(record: Message, note: CopyNote) -> RecordHeaders:
    """Return the headers of a record's copy."""
    kept = [(name, value) for name, value in record.headers() or [] if name not in (NOTE, KEY)]
    return [*kept, (NOTE, msgspec.json.encode(note))]


def text_of(value: bytes | str | None) -> str:
    """Return a key or a header as text; bytes that are not text are escaped."""
    if value is None or isinstance(value, str):
        return value or ""
    return value.decode("utf-8", "backslashreplace")


@lru_cache(maxsize=1000)
def record_header(header: str) -> str:
    """Return the name of a message's header in a record."""
    return KAFKA + header.removeprefix(CLOUDEVENTS) if header.startswith(CLOUDEVENTS) else header


def _our_name(header: str) -> str:
    return CLOUDEVENTS + header.removeprefix(KAFKA) if header.startswith(KAFKA) else header

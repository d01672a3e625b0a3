"""
Messages as Kafka's records.

Source: CloudEvents 1.0, Kafka protocol binding, binary mode. Attributes are headers with the prefix `ce_`; headers of the outbox
that are no attributes have their own names, like those of the publisher.
"""

from __future__ import annotations

from outbox.brokers.base import Outgoing

CLOUDEVENTS, KAFKA = "ce-", "ce_"


def record_key(message: Outgoing) -> bytes | None:
    """Return the key of a message's record, which chooses the partition. None: any partition."""
    return message.key.encode() if message.key else None


def record_headers(message: Outgoing) -> list[tuple[str, bytes]]:
    """Return the headers of a message's record."""
    return [(_name(name), value.encode()) for name, value in message.headers.items()]


def record_size(message: Outgoing) -> int:
    """Return the size of a message's record in bytes; Kafka adds at most some 100 bytes to it."""
    headers = sum(len(name) + len(value) + 4 for name, value in record_headers(message))
    return len(message.body) + len(record_key(message) or b"") + headers


def _name(header: str) -> str:
    return KAFKA + header.removeprefix(CLOUDEVENTS) if header.startswith(CLOUDEVENTS) else header

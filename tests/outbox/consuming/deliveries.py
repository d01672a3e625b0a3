"""Messages as a relay sends them, and as a broker hands them out."""

from __future__ import annotations

import msgspec

from outbox.brokers.base import Delivery, Outgoing
from outbox.message import Header, Message
from outbox.models import FailureCount
from tests.factories import message_id

SOURCE = "urn:uuid:of-the-tests"


def headers_of(message: Message, **more: str) -> dict[str, str]:
    meta = message._meta
    own = {Header.TYPE: meta.type, Header.VERSION: str(meta.version), Header.CONTENT_TYPE: "application/json"}
    return own | {name.replace("_", "-"): value for name, value in more.items()}


def numbered(number: int, lane: int = 1, source: str = SOURCE) -> dict[str, str]:
    return {Header.SOURCE: source, Header.LANE: str(lane), Header.NUMBER: str(number)}


def outgoing(message: Message, *, named: str = "", headers: dict[str, str] | None = None, **fields) -> Outgoing:
    """A message as a relay would send it."""
    fields = {"topic": message._meta.topic, "tag": message._meta.tag, "body": msgspec.json.encode(message)} | fields
    return Outgoing(message_id=named or str(message_id()), headers=headers_of(message) | (headers or {}), **fields)


def delivery(message: Message, *, group: str = "cart", named: str = "", headers=None, **fields) -> Delivery:
    """A message as a broker would hand it out."""
    fields = {"topic": message._meta.topic, "tag": message._meta.tag, "body": msgspec.json.encode(message)} | fields
    return Delivery(
        group=group,
        message_id=named or str(message_id()),
        receipt="",
        headers=headers_of(message) | (headers or {}),
        **fields,
    )


def end_delays() -> None:
    """End the delays of all messages that failed, as if their time had passed."""
    FailureCount.objects.update(due_at=None)

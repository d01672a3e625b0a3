"""The attributes of a delivery: `Context` is what its handler receives, and `DeliveryInfo` what the tables store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, UUID, uuid4, uuid5

import msgspec

from outbox import conf
from outbox.errors import UnreadableBody
from outbox.logs import log_fields, storable
from outbox.message import Header, TopicType

if TYPE_CHECKING:  # so that registering a handler imports no broker
    from outbox.brokers.base import Delivery

SOURCE_PREFIX = "urn:uuid:"  # begins the source of each outbox, whose message ids are UUIDs
MAX_KEY_BYTES = 500  # limit of idempotency keys and order keys; PostgreSQL can index up to 2,704 bytes


class Context(msgspec.Struct, frozen=True):
    """
    The context that a handler receives with a message.

    Args:
        delivery_count: how often the message was delivered to the group by the broker, or run as a deferred message, including
            this time. Deployments and outages cause deliveries, too.
        failures: how often the handler has failed with the message before.
        idempotency_key: the same for each delivery of the message to the group. Pass it to external services, so that they
            act only once.
        source, lane, number: identify the message in the order in which a relay sent it: numbers have no gaps per source, topic
            and lane. Lane and number are None for messages of other producers.
        stored_at: when the broker made the message visible; None if the broker does not report it.
    """

    message_id: str
    group: str
    topic: str
    key: str
    tag: str
    headers: Mapping[str, str]
    delivery_count: int
    idempotency_key: str
    source: str
    lane: int | None
    number: int | None
    stored_at: datetime | None
    failures: int = 0


class DeliveryInfo(msgspec.Struct, frozen=True):
    """
    The columns that describe a delivery, in the tables of the inbox, deferred messages, failures and duplicates.

    Args:
        message_id: the message's id, if that is a UUID and the source an outbox; otherwise a UUID derived from
            `idempotency_key_of`.
        source: in the form of `as_key`, since indexes contain it.
        lane, number: None if the message has no number.
    """

    group: str
    topic: str
    message_id: UUID
    delivery_count: int
    source: str
    lane: int | None
    number: int | None

    @classmethod
    def of(cls, delivery: Delivery) -> DeliveryInfo:
        lane, number = _lane_and_number(delivery.headers)
        if delivery.message_id:
            message_id = uuid_of(idempotency_key_of(delivery.message_id, delivery.headers.get(Header.SOURCE, ""), delivery.topic))
        elif delivery.pos is not None:
            message_id = uuid5(NAMESPACE_OID, f"{delivery.topic} {delivery.queue} {delivery.pos}")
        else:
            message_id = uuid4()
        return cls(
            group=delivery.group,
            topic=delivery.topic,
            message_id=message_id,
            delivery_count=delivery.delivery_count,
            source=as_key(delivery.headers.get(Header.SOURCE, "")),
            lane=lane,
            number=number,
        )


def context_of(delivery: Delivery, idempotency_key: str, failures: int) -> Context:
    """Return the context for a handler; `failures` is how often the handler has failed with the message before."""
    lane, number = _lane_and_number(delivery.headers)
    return Context(
        message_id=delivery.message_id,
        group=delivery.group,
        topic=delivery.topic,
        key=delivery.key,
        tag=delivery.tag,
        headers=delivery.headers,
        delivery_count=delivery.delivery_count,
        failures=failures,
        idempotency_key=f"{delivery.group}:{idempotency_key}",
        source=delivery.headers.get(Header.SOURCE, ""),
        lane=lane,
        number=number,
        stored_at=delivery.stored_at,
    )


def fields_of(*deliveries: Delivery) -> dict[str, Any]:
    """Return the fields of a log record about one or more deliveries to a group."""
    first = deliveries[0]
    if len(deliveries) == 1:
        return log_fields(message_id=first.message_id, topic=first.topic, group=first.group, delivery_count=first.delivery_count)
    return log_fields(message_ids=(each.message_id for each in deliveries), topic=first.topic, group=first.group)


def _lane_and_number(headers: Mapping[str, str]) -> tuple[int, int] | tuple[None, None]:
    lane, number = headers.get(Header.LANE, ""), headers.get(Header.NUMBER, "")
    if not (lane.isdecimal() and number.isdecimal()) or len(lane) > 5 or len(number) > 19:
        return None, None
    is_storable = int(lane) < 2**15 and int(number) < 2**63  # other producers may write any number
    return (int(lane), int(number)) if is_storable else (None, None)


def require_id(delivery: Delivery) -> None:
    """
    Raise an error if a message has no id.

    Raises:
        UnreadableBody: the producer set no id, or the message could not be read. So the group cannot tell it from duplicates.
    """
    if not delivery.message_id:
        require_readable(delivery)
        raise UnreadableBody(
            f"A message on topic {delivery.topic!r} has no message id, so the group cannot tell it from duplicates.",
            hint="Change its producer so that it sets a message id.",
        )


def require_readable(delivery: Delivery) -> None:
    """
    Raise an error if the broker's client could not read a message.

    Raises:
        UnreadableBody: the error text has the reason. The body has the bytes as they were received.
    """
    if reason := delivery.headers.get(Header.UNREADABLE):
        raise UnreadableBody(f"A message on topic {delivery.topic!r} ({delivery.queue}/{delivery.pos}) cannot be read: {reason}")


def idempotency_key_of(message_id: str, source: str, topic: str) -> str:
    """
    Return the string that identifies a message for a group: the id of a message of an outbox.

    If another producer names a source (`ce-source`), the string contains source and id, since CloudEvents 1.0 requires only that
    both together are unique. Without a source, the string contains topic and id: ids are assumed to be unique within a topic.
    """
    if source.startswith(SOURCE_PREFIX):
        return as_key(message_id)
    return as_key(f"{source} {message_id}" if source else f"topic {topic} {message_id}")


def order_key_of(delivery: Delivery) -> str | None:
    """Return the string that identifies group, topic and key of a message on a fifo topic; None for other messages."""
    if not delivery.key or conf.topic_settings(delivery.topic).type is not TopicType.FIFO:
        return None
    return as_key(f"{delivery.group} {delivery.topic} {delivery.key}")


def as_key(text: str) -> str:
    """Return a string in a form that PostgreSQL can store and index; a long string is replaced by its hash."""
    text = storable(text)
    if len(text) <= MAX_KEY_BYTES // 4 or len(encoded := text.encode()) <= MAX_KEY_BYTES:
        return text
    return f"sha256:{hashlib.sha256(encoded).hexdigest()}"


def uuid_of(message_id: str) -> UUID:
    """Return a message id as a UUID, for the tables; if it is not one, a UUID that is derived from it."""
    try:
        return UUID(message_id)
    except ValueError:
        return uuid5(NAMESPACE_OID, message_id)


def columns_of(arrivals: Sequence[DeliveryInfo]) -> dict[str, list[Any]]:
    """Return the values of inbox rows as lists, one for each column, with the column's name in the plural; for unnest()."""
    names = ("message_id", "source", "topic", "lane", "number", "delivery_count")
    return {f"{name}s": [getattr(arrival, name) for arrival in arrivals] for name in names}

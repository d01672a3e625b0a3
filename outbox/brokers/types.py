"""The types that brokers and their callers exchange. Import them from `outbox.brokers.base`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_DELIVERY_COUNT = 1_000_000  # another producer may have written any number


class SendStatus(enum.StrEnum):
    """The result of sending a message."""

    ACCEPTED = "accepted"  # the broker has it
    REFUSED = "refused"  # this message can never be sent
    MISCONFIGURED = "misconfigured"  # topic or queue missing, wrong type, no permission: an operator must act
    UNAVAILABLE = "unavailable"  # a problem at the broker; the message is not stored for all of its consumer groups
    UNSURE = "unsure"  # may or may not be stored


class SendGuarantee(enum.StrEnum):
    """How often readers of a topic see a published message, even if processes or servers are killed."""

    ONCE = "once"
    ONCE_COMMITTED = "once if read_committed"  # other readers also see copies in transactions that were not committed
    AT_LEAST_ONCE = "at least once"
    UNCONFIRMED = "unconfirmed"  # possibly never, since the broker's answer proves nothing


class Limits(msgspec.Struct, frozen=True):
    """
    The guarantee for the messages of a topic, and the limits that callers must respect.

    Args:
        guarantee: how often readers see a published message.
        send: how long a send of one batch takes if every request takes its full timeout. A lease must be longer.
        handling: how long a delivery can be held, including renewals. None: without limit.
        redelivery: how long after its handling a message may be delivered to its group again, unless `may_deliver_again` names
            it. Its inbox row must be kept for this time. None: OPTIONS do not tell. The broker's page says how long.
        check_back: the maximum age of a half message in a check-back. The rows that decide the answer must be kept longer.
        body_bytes: the maximum size of a body.
    """

    guarantee: SendGuarantee = SendGuarantee.AT_LEAST_ONCE
    send: timedelta = timedelta()
    handling: timedelta | None = None
    redelivery: timedelta | None = None
    check_back: timedelta = timedelta(minutes=10)
    body_bytes: int = DEFAULT_MAX_BODY_BYTES


class EndSemantics(enum.StrEnum):
    """The effect of a second end (commit or rollback) of a half message. Source: docs/explanation/half-messages.md."""

    IDEMPOTENT = "idempotent"  # embedded broker: the first end is stored, and returned by later ones
    STATELESS = "stateless"  # RocketMQ: every COMMIT makes a copy, even after ROLLBACK or a discard


class Ended(enum.StrEnum):
    """The state of a half message after an end."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    DISCARDED = "discarded"
    NOT_FOUND = "not_found"


class HalfStatus(enum.StrEnum):
    """The state of a half message, as far as its broker can tell. Source: docs/explanation/half-messages.md."""

    VISIBLE = "visible"  # its message has reached the topic
    HIDDEN = "hidden"  # the half message is stored, and its message is not visible: it can be ended
    GONE = "gone"  # neither is stored, but the broker still has everything of that age: the message was never visible
    UNPROVEN = "unproven"  # neither is stored, and the broker does not have everything of that age: nothing is proved
    UNKNOWN = "unknown"  # the broker cannot tell now


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """
    A message on its way to a broker.

    Args:
        token: the text by which a half message is found again; "" for other messages.
        deliver_at: the earliest time of delivery; only on topics of type delay.
        half_id: the id of the half message, from `new_half_id`; "": the broker creates an id.
    """

    message_id: str
    topic: str
    body: bytes
    key: str = ""
    tag: str = ""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    token: str = ""
    deliver_at: datetime | None = None
    half_id: str = ""


class HalfRef(msgspec.Struct, frozen=True, gc=False):
    """
    A reference to a half message at its broker.

    Args:
        place: where the broker stores it, from `SendResult.place`. "": unknown; the broker then looks for its id.
        source: the stable id of the outbox that sent it. "": unknown.
        decided_at: when that outbox decided to commit it, shortly after it was stored. None: unknown, or not decided.
    """

    topic: str
    half_id: str
    message_id: str
    place: str = ""
    source: str = ""
    decided_at: datetime | None = None


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """
    The result for one message.

    Args:
        half_id: the broker's id of the half message, after `send_halves`.
        place: where the broker stores the half message, in the broker's format; "" if the broker can find it without this.
        ended: the state of the half message after `end`, which may differ from the requested one.
        reason: an explanation for operators, for every status except ACCEPTED.
    """

    status: SendStatus
    half_id: str = ""
    ended: Ended | None = None
    reason: str = ""
    place: str = ""


ACCEPTED = SendResult(SendStatus.ACCEPTED)


class Delivery(msgspec.Struct, frozen=True):
    """
    A message delivered to a consumer group.

    Args:
        receipt: identifies this delivery to the broker; another delivery of the same message has another receipt. `renew` may
            replace it.
        delivery_count: how many times it was delivered to the group, including this time.
        stored_at: when the broker made it visible.
        queue, pos: where it is stored, in the broker's format; another copy of the message has other values. None: unknown.
        dead_letter_reason: why the server moved it to a dead-letter queue, if `receive_dead_letters` returned it; otherwise "".
    """

    group: str
    topic: str
    message_id: str
    body: bytes
    receipt: str
    key: str = ""
    tag: str = ""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    delivery_count: int = 1
    stored_at: datetime | None = None
    queue: str = ""
    pos: int | None = None
    dead_letter_reason: str = ""


class Backlog(NamedTuple):
    """
    The numbers of messages at a broker that a consumer group has not received or not acknowledged.

    Args:
        waiting: topic -> number, including messages that are being handled, if the broker can count them.
        dead_letters: topic -> number of messages that are in the server's dead-letter queue; topics with 0 may be missing.
    """

    waiting: Mapping[str, int]
    dead_letters: Mapping[str, int] = {}


class StoredCopy(msgspec.Struct, frozen=True):
    """
    A message stored at its broker.

    Args:
        state: half, visible, delayed, rolled_back or discarded.
        asked: the number of check-backs about the half message.
        ended_at: when the half message was committed or rolled back.
    """

    message_id: str
    topic: str
    state: str
    half_id: str = ""
    stored_at: datetime | None = None
    asked: int = 0
    ended_at: datetime | None = None


# Reads a page of messages, in the order of a key. Arguments: the key after which the page begins (None: from the beginning), the
# maximum number of messages, and whether to return the newest messages instead, newest first. Returns each key with its message;
# None instead of a message that is gone.
ReadPage = Callable[[Any, int, bool], list[tuple[Any, Delivery | None]]]

# Messages that consumers have not received yet: the noun for one, such as "waiting message", and the function that reads them.
StoredList = tuple[str, ReadPage]


class GroupPosition(msgspec.Struct, frozen=True):
    """
    The position of a group in a queue or partition of a topic, and the position to which it is to be moved.

    Args:
        queue: the queue or partition, in the broker's terms.
        pos: the group's next message there; None if the group has not begun to read.
        wanted: the next message after the move.
        ahead: the maximum number of messages that the move skips; below 0: that are delivered again.
    """

    topic: str
    queue: str
    pos: int | None
    wanted: int
    ahead: int


class ServerResource(msgspec.Struct, frozen=True):
    """
    A topic, group or queue that a broker needs at its server, and its state there.

    Args:
        kind: a word of the broker's documentation, such as "topic" or "marker topic".
        wanted: the settings with which it is created, in the server's terms.
        create: creates it if it is missing, and changes nothing otherwise. Raises BrokerUnavailable.
        exists: whether it exists. None: the server did not say; `trouble` says why.
        differences: how the existing one differs from what the topics need, such as "2 partitions, not 4".
        trouble: what could not be read, and what to do about it.
        place: the node that has it, if each node has a separate one; otherwise "".
    """

    kind: str
    name: str
    wanted: Mapping[str, str]
    create: Callable[[], object]
    exists: bool | None
    differences: tuple[str, ...] = ()
    trouble: str = ""
    place: str = ""

"""The types that brokers and their callers exchange. Import them from `outbox.brokers.base`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024


class SendStatus(enum.StrEnum):
    """The result of sending a message."""

    ACCEPTED = "accepted"  # the broker has it
    REFUSED = "refused"  # this message can never be sent
    MISCONFIGURED = "misconfigured"  # topic or queue missing, wrong type, no permission: an operator must act
    UNAVAILABLE = "unavailable"  # a problem at the broker; the message is not stored for all of its consumer groups
    UNSURE = "unsure"  # may or may not be stored


class SendGuarantee(enum.StrEnum):
    """How often the readers of a topic see a published message, whatever is killed in between."""

    ONCE = "once"
    ONCE_COMMITTED = "once if read_committed"  # uncommitted readers also see copies of transactions that were not committed
    AT_LEAST_ONCE = "at least once"
    UNCONFIRMED = "unconfirmed"  # perhaps never: the broker's answer proves nothing


class Limits(msgspec.Struct, frozen=True):
    """
    What the messages of a topic are promised, and the times that callers must respect.

    Args:
        guarantee: how often readers see a published message.
        send: how long a send of one batch takes if every request takes its full timeout. A lease must be longer.
        handling: how long a delivery can be held, renewals included. None: for any time.
        redelivery: how long after it was handled a message that `may_deliver_again` does not name may come to its group again.
            Its inbox row must be kept as long. None: the options do not tell; then `check` compares with the server's settings.
        check_back: the maximum age of a half message in a check-back. The rows that decide the answer must be kept longer.
        body_bytes: the size of the largest body.
    """

    guarantee: SendGuarantee = SendGuarantee.AT_LEAST_ONCE
    send: timedelta = timedelta()
    handling: timedelta | None = None
    redelivery: timedelta | None = None
    check_back: timedelta = timedelta(minutes=10)
    body_bytes: int = DEFAULT_MAX_BODY_BYTES


class EndSemantics(enum.StrEnum):
    """The effect of a second end of one half message at a broker. Source: docs/explanation/half-messages.md."""

    IDEMPOTENT = "idempotent"  # embedded: the first end wins, is remembered and returned
    STATELESS = "stateless"  # RocketMQ: every COMMIT makes a copy, also after ROLLBACK or a discard


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
    GONE = "gone"  # neither is there, and the broker keeps everything of that age: the message was never visible
    UNPROVEN = "unproven"  # neither is there, but the broker does not keep everything of that age: nothing is proved
    UNKNOWN = "unknown"  # the broker cannot tell now


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """
    A message on its way to a broker.

    Args:
        token: text of the token; only on half messages.
        deliver_at: the earliest time of delivery; only on topics of type delay.
        half_id: the id of the half message, from `new_half_id`; "": the broker makes one when it stores it.
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
        place: where the broker stores it, from `SendResult.place`. "": unknown; the broker then finds it by its id.
        source: the stable id of the database that it was sent from. "": unknown.
        decided_at: when that database decided to commit it, shortly after it was stored. None: unknown, or not decided.
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
        place: where the broker stores the half message, in a form of its own; "" where it does not need this to find it.
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
        receipt: identifies this delivery to the broker; another delivery of the same message has another one. `renew` may
            replace it.
        delivery_count: how many times it was delivered to the group, including this time.
        stored_at: when the broker made it visible.
        queue, pos: where it is stored, in a form of the broker; another copy of the message has other values. None: unknown.
        given_up: why the server gave it up, from `receive_given_up`; "" for all others.
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
    given_up: str = ""


class Backlog(NamedTuple):
    """
    What a consumer group has not received or not acknowledged, at its broker.

    Args:
        waiting: topic -> messages, those being handled included.
        given_up: topic -> messages that the server gave up and nobody has received, where there are any.
    """

    waiting: Mapping[str, int]
    given_up: Mapping[str, int] = {}


class StoredCopy(msgspec.Struct, frozen=True):
    """
    A message stored at its broker.

    Args:
        state: half, visible, delayed, rolled_back or discarded.
        asked: how often the broker has asked about the half message.
        ended_at: when the half message was ended.
    """

    message_id: str
    topic: str
    state: str
    half_id: str = ""
    stored_at: datetime | None = None
    asked: int = 0
    ended_at: datetime | None = None


# Returns keys with their messages, up to a limit, after a key or from the beginning (None); the newest ones of them, the newest
# first, if the last argument is true. None instead of a message that is gone.
ReadPage = Callable[[Any, int, bool], list[tuple[Any, Delivery | None]]]

# Messages that a consumer is still to get, in the order of a key: the name of one of them, such as "waiting message".
StoredList = tuple[str, ReadPage]


class GroupPosition(msgspec.Struct, frozen=True):
    """
    The position of a group in one part of a topic, and the wanted one.

    Args:
        queue: the part, in the broker's terms.
        pos: its next message there; None where it has not begun.
        wanted: its next message afterwards.
        ahead: the number of messages, at most, that it would skip; below 0: that it would be delivered again.
    """

    topic: str
    queue: str
    pos: int | None
    wanted: int
    ahead: int


class ServerResource(msgspec.Struct, frozen=True):
    """
    A topic, group or queue that a broker needs at its server, and what is there.

    Args:
        kind: a word of the broker's page, such as "topic" or "marker topic".
        wanted: the settings that it is created with, in the server's words.
        create: creates it if it is missing, and changes nothing otherwise. Raises BrokerUnavailable.
        is_there: None: the server did not tell; `trouble` says why.
        differences: what exists otherwise than the topics need it, such as "2 partitions, not 4".
        trouble: what could not be read, and what to do about it.
        place: the node that it is on, where each node has its own.
    """

    kind: str
    name: str
    wanted: Mapping[str, str]
    create: Callable[[], object]
    is_there: bool | None
    differences: tuple[str, ...] = ()
    trouble: str = ""
    place: str = ""

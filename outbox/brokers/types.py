"""
What travels between a broker and its callers. Import these names from `outbox.brokers.base`, beside the contract.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


class SendStatus(enum.StrEnum):
    """What became of a message that was sent."""

    ACCEPTED = "accepted"  # the broker has it
    REFUSED = "refused"  # this very message can never go
    MISCONFIGURED = "misconfigured"  # topic missing, wrong type, no permission: an operator must act
    UNAVAILABLE = "unavailable"  # the broker's trouble, the message is surely not stored
    UNSURE = "unsure"  # may or may not be stored


class EndSemantics(enum.StrEnum):
    """What a broker does with a second end of one half message. Source: docs/guarantees.md."""

    IDEMPOTENT = "idempotent"  # BI: the first end wins, is remembered and returned
    FORGETFUL = "forgetful"  # BF: the first end wins, a later one gets NOT_FOUND
    DUPLICATING = "duplicating"  # BD: a second COMMIT makes a second copy
    STATELESS = "stateless"  # BS: every COMMIT makes a copy, also after ROLLBACK or a discard


class Ended(enum.StrEnum):
    """How a half message stands after an end."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    DISCARDED = "discarded"
    NOT_FOUND = "not_found"


class HalfStanding(enum.StrEnum):
    """Where a half message stands, as far as its broker can tell. Source: docs/explanation/not-found.md."""

    VISIBLE = "visible"  # its message has reached the topic
    HIDDEN = "hidden"  # the half message is stored and its message is not visible: it can be ended
    GONE = "gone"  # neither is there, and the broker keeps all that is as old: the message was never visible
    UNPROVEN = "unproven"  # neither is there, and the broker does not keep what is as old: nothing is proved
    UNKNOWN = "unknown"  # the broker cannot tell now


@dataclass(frozen=True, slots=True)
class Outgoing:
    """
    A message on its way to a broker.

    Args:
        token: text of the token; only on half messages.
        deliver_at: not before this time; only on topics of type delay.
        half_id: the id of the half message, where `new_half_id` has made one; "": the broker makes one when it stores it.
    """

    message_id: str
    topic: str
    body: bytes
    key: str = ""
    tag: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    token: str = ""
    deliver_at: datetime | None = None
    half_id: str = ""


@dataclass(frozen=True, slots=True)
class HalfRef:
    """
    What finds a half message at its broker again.

    Args:
        place: where the broker stores it, as `SendResult.place` had it. "": not known; the broker then finds it by its id.
        source: the stable id of the database that it was sent from. "": not known.
        decided_at: when that database decided to commit it; it was stored about then. None: not known, or not decided.
    """

    topic: str
    half_id: str
    message_id: str
    place: str = ""
    source: str = ""
    decided_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class SendResult:
    """
    What became of one message.

    Args:
        half_id: the broker's id of the half message, after `send_halves`.
        place: where the broker stores the half message, in words of its own; "" where it needs none to find it again.
        ended: how the half message stands now, after `end`; it may differ from what was asked.
        reason: for every status but ACCEPTED, what an operator should read.
    """

    status: SendStatus
    half_id: str = ""
    ended: Ended | None = None
    reason: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """
    A message handed to a consumer group.

    Args:
        receipt: names this very delivery to the broker; another delivery of the same message has another one. `renew` may
            replace it.
        attempt: how many times the group has been handed it, this time included.
        stored_at: when the broker made it visible.
        queue, pos: where it lies, in the broker's words; another copy of the message lies elsewhere. None: not known.
    """

    group: str
    topic: str
    message_id: str
    body: bytes
    receipt: str
    key: str = ""
    tag: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 1
    stored_at: datetime | None = None
    queue: str = ""
    pos: int | None = None


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """
    A message as its broker stores it.

    Args:
        state: half, visible, delayed, rolled_back, discarded or dead_letter.
        asked: how often its producers were asked about it, as a half message.
        ended_at: when it ended, as a half message.
    """

    message_id: str
    topic: str
    state: str
    half_id: str = ""
    stored_at: datetime | None = None
    asked: int = 0
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class DeadLetterCount:
    """Dead letters of a group in a topic, which the broker keeps."""

    consumer_group: str
    topic: str
    letters: int


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """
    What an operator should know of what a broker keeps in a database.

    Args:
        parked: topic -> half messages that the broker has stopped asking about.
    """

    parked: dict[str, int] = field(default_factory=dict)
    dead_letters: list[DeadLetterCount] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up. `id` names it for `replay` and `discard`."""

    id: str
    group: str
    topic: str
    message_id: str
    reason: str
    attempt: int
    died_at: datetime


@dataclass(frozen=True, slots=True)
class Problem:
    """What `check()` found wrong with a broker's options or topics."""

    text: str
    hint: str
    is_error: bool = True

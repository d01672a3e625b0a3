"""
A batch as a relay holds it in memory, and the results of its sends.

A position is a message's place in its batch, from 1. To decide a batch is to record that its half messages will be committed. To
end a half message is to commit it or roll it back.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from outbox.brokers.base import HalfRef, SendResult, SendStatus
from outbox.logs import cut, storable
from outbox.message import TopicType

MessageContent = tuple[str, str | None, str | None, bytes]
"""The content of a message: key, headers, about, body. All are None if the message row is gone."""


class Transaction(NamedTuple):
    """The transaction at the broker that may hold a batch: the lane that sends it, and the batch's attempt in its marker."""

    lane: int
    attempt: int


class ClaimedBatch(msgspec.Struct, frozen=True):
    """
    A batch under this relay's lease.

    Args:
        lane: None, like `first_seq`, for a batch that was written half first, since its message has no number.
        message_ids: the message at position p (from 1) is `message_ids[p - 1]`, its number `first_seq + p - 1`.
        order_keys: one per position on ordered topics; None on others.
        split: positions that were moved to another batch.
        failures: how many sends have failed; see `Run.is_counted` for failures that do not count.
        messages: one per position, if the claim has loaded them; None if they are loaded later.
        transaction: the transaction at the broker that may hold the batch; None if certainly none does.
    """

    id: int
    attempt: int
    topic: str
    type: TopicType
    lane: int | None
    first_seq: int | None
    message_ids: Sequence[str]
    order_keys: Sequence[int] | None = None
    split: frozenset[int] = frozenset()
    failures: int = 0
    messages: Sequence[MessageContent] | None = None
    transaction: Transaction | None = None

    @property
    def positions(self) -> Sequence[int]:
        """The positions that are still in the batch."""
        every = range(1, len(self.message_ids) + 1)
        return [position for position in every if position not in self.split] if self.split else every


class SplitReason(enum.StrEnum):
    """Why a message is split off its batch, or returned with it. The first four are statuses of a send."""

    REFUSED = SendStatus.REFUSED.value
    MISCONFIGURED = SendStatus.MISCONFIGURED.value
    UNAVAILABLE = SendStatus.UNAVAILABLE.value
    UNSURE = SendStatus.UNSURE.value
    HELD = "held"  # not sent, because an earlier message of its key was not accepted
    SHED = "shed"  # not sent, because half of the lease was over, the relay stopped, or its transaction failed or was full
    DISCARDED = "discarded"  # decided, but the broker has rolled the half message back or discarded it
    UNPROVEN = "unproven"  # decided, but the broker no longer keeps what would prove whether it was published

    @property
    def is_failure(self) -> bool:
        """Whether the send was tried and failed, so that the failure is recorded."""
        return self not in (SplitReason.HELD, SplitReason.SHED)


class Unaccepted(msgspec.Struct, frozen=True):
    """Why one message was not accepted. `text` is for operators, in a form that can be stored: a long one is cut."""

    reason: SplitReason
    text: str

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "text", cut(storable(self.text)))


HELD = Unaccepted(SplitReason.HELD, "An earlier message of its key was not accepted.")


class BatchSendResult(msgspec.Struct, frozen=True):
    """
    The result of sending a batch. In the end, each position is in either `accepted` or `unaccepted`.

    Args:
        accepted: position -> id of the half message; "" for a one-phase message.
        half_places: position -> where the broker stores the half message (`HalfRef.place`), if that is known.
        source: the stable id of the database, which the half messages carry in their tokens.
    """

    batch: ClaimedBatch
    accepted: dict[int, str] = msgspec.field(default_factory=dict)
    unaccepted: dict[int, Unaccepted] = msgspec.field(default_factory=dict)
    half_places: dict[int, str] = msgspec.field(default_factory=dict)
    source: str = ""

    def record(self, positions: Sequence[int], outcomes: Iterable[SendResult]) -> list[SendResult]:
        """Add the results of the messages at positions; return the results that are not ACCEPTED."""
        accepted, failed = SendStatus.ACCEPTED, []
        for position, outcome in zip(positions, outcomes, strict=True):
            if outcome.status is accepted:
                self.accepted[position] = outcome.half_id
                if outcome.place:
                    self.half_places[position] = outcome.place
            else:
                self.unaccepted[position] = Unaccepted(SplitReason(outcome.status), outcome.reason)
                failed.append(outcome)
        return failed

    def complete(self, rest: Unaccepted | None) -> None:
        """
        Set the reason of positions without a result; `rest` may be None if there are none.

        The reason is HELD after a message of the same key that was not accepted, otherwise `rest`. A message that is SHED does
        not hold later messages of its key: they are SHED, too, so all of them stay together.
        """
        held: set[int | None] = set()
        for position in self.batch.positions:
            key = self.batch.order_keys[position - 1] if self.batch.order_keys is not None else position
            if position not in self.accepted and (reason := HELD if key in held else rest):
                self.unaccepted.setdefault(position, reason)
            if position in self.unaccepted and self.unaccepted[position].reason is not SplitReason.SHED:
                held.add(key)

    def half(self, position: int) -> HalfRef:
        """Return the reference to the half message at a position; it has no `decided_at` yet."""
        batch = self.batch
        place = self.half_places.get(position, "")
        return HalfRef(batch.topic, self.accepted[position], batch.message_ids[position - 1], place, self.source)


class PreparedBatch(msgspec.Struct, frozen=True):
    """
    A batch in state PREPARED whose half messages are to be committed.

    Args:
        half_ids: one per position; None for positions that were split off.
        positions: the positions whose commit has no answer yet.
        half_places: position -> where the broker stores the half message, if that is known.
        source: the stable id of the database.
        decided_at: None in the process that has just decided the batch, since only look-ups need it.
        ends_until: until when its holder may end the half messages, as read from the row; taking the batch over changes it.
        is_fresh: whether this process has just written the decision, so that no half message can have been committed before.
    """

    id: int
    attempt: int
    topic: str
    message_ids: Sequence[str]
    half_ids: Sequence[str | None]
    positions: Sequence[int]
    failures: int = 0
    half_places: Mapping[int, str] = msgspec.field(default_factory=dict)
    source: str = ""
    decided_at: datetime | None = None
    ends_until: datetime | None = None
    is_fresh: bool = False

    def half(self, position: int) -> HalfRef:
        """Return the reference to the half message at a position."""
        half_id = self.half_ids[position - 1]
        if half_id is None:
            raise ValueError(f"Position {position} of batch {self.id} was split off.")
        place = self.half_places.get(position, "")
        return HalfRef(self.topic, half_id, self.message_ids[position - 1], place, self.source, self.decided_at)

    def halves(self) -> list[HalfRef]:
        """Return references to the half messages whose commit has no answer yet, in the order of the positions."""
        return [self.half(position) for position in self.positions]


def places_as_stored(places: Mapping[int, str], size: int) -> list[str | None] | None:
    """Return the places of half messages in the form of the column `half_places`; None if no place is known."""
    if not any(places.values()):
        return None
    return [places.get(position) or None for position in range(1, size + 1)]

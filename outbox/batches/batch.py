"""What the relay holds in memory of a batch, and of how its messages fared."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from outbox.brokers.base import HalfRef, SendResult, SendStatus
from outbox.message import TopicType
from outbox.models import State

UNFINISHED = f"({State.RELEASED}, {State.CLAIMED}, {State.PREPARED})"
"""The states of a batch that is still to be sent: SQL. As literals, or PostgreSQL could not use the partial index on them."""


MessageRow = tuple[str, str | None, str | None, bytes]
"""What a message says: key, headers, about, body. Headers are None where its row is gone, and then no more is known of it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """
    A batch under this relay's lease.

    Args:
        lane: None, like `first_seq`, for a batch that began half first; it has no numbers.
        message_ids: the message at position p (from 1) is `message_ids[p - 1]`, its number `first_seq + p - 1`.
        order_keys: one per position on ordered topics.
        split: positions that left for another batch; they are no concern of this one.
        tries: how many sends have failed.
        messages: what they say, one per position, where it came along with the claim. None: it is yet to be loaded.
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
    tries: int = 0
    messages: Sequence[MessageRow] | None = None

    @property
    def positions(self) -> Sequence[int]:
        """The positions that are still in the batch."""
        every = range(1, len(self.message_ids) + 1)
        return [position for position in every if position not in self.split] if self.split else every


class SplitReason(enum.StrEnum):
    """Why a message leaves its batch. The first four are outcomes of a send, as the broker or the relay has them."""

    REFUSED = SendStatus.REFUSED.value
    MISCONFIGURED = SendStatus.MISCONFIGURED.value
    UNAVAILABLE = SendStatus.UNAVAILABLE.value
    UNSURE = SendStatus.UNSURE.value
    HELD = "held"  # an earlier message of its key was not accepted
    SHED = "shed"  # not handed over: the lease was half gone, or the relay was told to stop
    DISCARDED = "discarded"  # decided, but the broker has rolled the half message back or discarded it
    UNPROVEN = "unproven"  # decided, and the broker no longer keeps what would prove whether it was published

    @property
    def is_failure(self) -> bool:
        """Whether the message was handed over and failed, so that it is written down and its try is counted."""
        return self not in (SplitReason.HELD, SplitReason.SHED)


@dataclass(frozen=True, slots=True)
class Unaccepted:
    """Why one message was not accepted. `text`: what an operator should read."""

    reason: SplitReason
    text: str


@dataclass(frozen=True, slots=True)
class BatchSendResult:
    """
    What the broker made of the messages of a batch. Each position of the batch is in one of the two.

    Args:
        accepted: position -> id of the half message; "" for a whole message.
        half_places: position -> where the broker stores the half message, as `HalfRef.place` has it, where that is known.
        source: the stable id of the database, which the half messages carry in their tokens.
    """

    batch: Batch
    accepted: dict[int, str] = field(default_factory=dict)
    unaccepted: dict[int, Unaccepted] = field(default_factory=dict)
    half_places: dict[int, str] = field(default_factory=dict)
    source: str = ""

    def note(self, positions: Sequence[int], outcomes: Iterable[SendResult]) -> list[SendResult]:
        """Note what the broker made of the messages at positions; return those outcomes that are not ACCEPTED."""
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

    def half(self, position: int) -> HalfRef:
        """Name the half message at a position, which nobody has decided yet, to its broker."""
        batch = self.batch
        place = self.half_places.get(position, "")
        return HalfRef(batch.topic, self.accepted[position], batch.message_ids[position - 1], place, self.source)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """
    A batch in state PREPARED whose half messages are to be committed.

    Args:
        half_ids: one per position; None where the position was split off.
        positions: those whose commit has no answer yet.
        half_places: position -> where the broker stores the half message, where that is known.
        source: the stable id of the database.
        decided_at: None in the process that has just decided it, and needs no look-up.
        ends_until: as it was read; whoever takes the batch over later changes it.
    """

    id: int
    attempt: int
    topic: str
    message_ids: Sequence[str]
    half_ids: Sequence[str | None]
    positions: Sequence[int]
    tries: int = 0
    half_places: Mapping[int, str] = field(default_factory=dict)
    source: str = ""
    decided_at: datetime | None = None
    ends_until: datetime | None = None

    def half(self, position: int) -> HalfRef:
        """Name the half message at a position to its broker."""
        half_id = self.half_ids[position - 1]
        assert half_id is not None, f"position {position} of batch {self.id} was split off"
        place = self.half_places.get(position, "")
        return HalfRef(self.topic, half_id, self.message_ids[position - 1], place, self.source, self.decided_at)

    def halves(self) -> list[HalfRef]:
        """Name those whose commit has no answer yet to their broker, in the order of the positions."""
        return [self.half(position) for position in self.positions]


def places_as_stored(places: Mapping[int, str], size: int) -> list[str | None] | None:
    """Return the places of half messages as a batch's row holds them, one per position; None: none is known."""
    if not any(places.values()):
        return None
    return [places.get(position) or None for position in range(1, size + 1)]

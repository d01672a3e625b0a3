"""A broker that reads, accepts and discards every message: the rest is the relay's own cost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter

from outbox.brokers.base import (
    ACCEPTED,
    Ended,
    EndSemantics,
    HalfRef,
    HalfStatus,
    Outgoing,
    SendResult,
    SendStatus,
    StoredCopy,
)
from outbox.brokers.capabilities import HalfMessages
from outbox.message import Resolution

AWAY = SendResult(SendStatus.UNAVAILABLE, reason="away")
COMMITTED = SendResult(SendStatus.ACCEPTED, ended=Ended.COMMITTED)


_fields = attrgetter(*Outgoing.__struct_fields__)


def _read_all(messages: Sequence[Outgoing]) -> None:
    """Read each field of each message, as a sending broker has to: lazy values are computed here."""
    for message in messages:
        _fields(message)


class NullBroker(HalfMessages):
    end_semantics = EndSemantics.IDEMPOTENT
    supports_order = True
    supports_delay = True

    away: set[str] = set()  # topics that get no answer

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        _read_all(messages)
        if self.away:
            return [AWAY if message.topic in self.away else ACCEPTED for message in messages]
        return [ACCEPTED] * len(messages)

    def new_half_id(self, message_id: str) -> str:
        return message_id

    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        _read_all(messages)
        return [SendResult(SendStatus.ACCEPTED, half_id=message.message_id) for message in messages]

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        return [COMMITTED] * len(halves)

    def look_up_halves(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        return [HalfStatus.VISIBLE] * len(halves)

    def find(self, message_id: str, *, half: HalfRef | None = None) -> list[StoredCopy]:
        return []

    def close(self) -> None:
        """Do nothing."""

"""Planned faults: which call on which messages fails, how, and how often."""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from outbox.brokers.base import HalfRef, HalfStatus, Outgoing, SendResult

Item = Outgoing | HalfRef
Where = Callable[[Item], bool]


class FaultKind(enum.StrEnum):
    """What happens to the request, apart from the result that the caller gets."""

    LOST = "lost"  # it never arrives
    STORED = "stored"  # it arrives, but the answer is lost
    LATE = "late"  # it arrives at MemoryBroker.deliver_late()
    TWICE = "twice"  # it arrives twice, so a half message is stored twice; the caller gets the first answer


class Fault(msgspec.Struct):
    """A planned fault. `times`: for how many messages; None: for all until `heal()`."""

    call: str
    result: SendResult | None  # None: the caller gets the true result
    kind: FaultKind
    where: Where
    times: int | None
    status: HalfStatus | None = None  # the result of a look-up


def take(planned: list[Fault], call: str, message: Item) -> Fault | None:
    """Return the first planned fault for this message, and count it down."""
    for fault in planned:
        if fault.call == call and fault.where(message):
            if fault.times is not None:
                fault.times -= 1
                if fault.times <= 0:
                    planned.remove(fault)
            return fault
    return None

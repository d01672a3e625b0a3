"""Faults that a test plans for calls of the memory broker: which messages fail, how, and how often."""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from outbox.brokers.base import HalfRef, HalfStatus, Outgoing, SendResult

Item = Outgoing | HalfRef
Where = Callable[[Item], bool]


class FaultKind(enum.StrEnum):
    """The effect of a fault on the request. The result that the caller gets is separate (`Fault.result`)."""

    LOST = "lost"  # it never arrives
    STORED = "stored"  # it arrives, but the answer is lost
    LATE = "late"  # it arrives when MemoryBroker.deliver_late() is called
    TWICE = "twice"  # it arrives twice, so a half message is stored twice; the caller gets the first answer


class Fault(msgspec.Struct):
    """
    A planned fault.

    Args:
        times: the number of messages that it applies to; None: all, until `heal()`.
    """

    call: str
    result: SendResult | None  # None: the caller gets the true result
    kind: FaultKind
    where: Where
    times: int | None
    status: HalfStatus | None = None  # the result of a look-up


def take_fault(planned: list[Fault], call: str, message: Item) -> Fault | None:
    """Return the first planned fault for this message, if any, and count that it was applied. Remove it after the last time."""
    for fault in planned:
        if fault.call == call and fault.where(message):
            if fault.times is not None:
                fault.times -= 1
                if fault.times <= 0:
                    planned.remove(fault)
            return fault
    return None

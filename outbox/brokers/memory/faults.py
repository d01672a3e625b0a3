"""Planned faults: which call on which messages fails, how, and how often."""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from outbox.brokers.base import HalfRef, HalfStatus, Outgoing, SendResult, SendStatus

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


class Faults(msgspec.Struct):
    """The faults that a test has planned, in order."""

    planned: list[Fault] = msgspec.field(default_factory=list)

    def plan(self, call: str, status: SendStatus | None, reason: str, kind: FaultKind, where: Where, times: int | None) -> None:
        """Add a fault after those already planned."""
        result = None if status is None else SendResult(status, reason=reason or f"{status} on demand")
        self.planned.append(Fault(call, result, kind, where, times))

    def plan_lookup(self, status: HalfStatus, where: Where, times: int | None) -> None:
        """Add a fault of look-ups after those already planned."""
        self.planned.append(Fault("look_up_halves", None, FaultKind.LOST, where, times, status))

    def take(self, call: str, message: Item) -> Fault | None:
        """Return the first planned fault for this message, and count it down."""
        for fault in self.planned:
            if fault.call == call and fault.where(message):
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times <= 0:
                        self.planned.remove(fault)
                return fault
        return None

"""Faults on demand: which call on which messages goes wrong, how, and how often."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from outbox.brokers.base import HalfRef, HalfStatus, Outgoing, SendResult, SendStatus

Handed = Outgoing | HalfRef
Where = Callable[[Handed], bool]


class FaultKind(enum.StrEnum):
    """What becomes of the request itself, whatever the caller is told."""

    LOST = "lost"  # never arrives
    STORED = "stored"  # arrives; the caller does not hear of it
    LATE = "late"  # arrives when the test says so: MemoryBroker.deliver_late()
    TWICE = "twice"  # arrives two times; a half becomes two halves, the caller hears of the first


@dataclass(slots=True)
class Fault:
    """One planned fault. `times`: so many messages, None for all until `heal()`."""

    call: str
    outcome: SendResult | None  # None: the caller hears the true outcome
    fate: FaultKind
    where: Where
    times: int | None
    status: HalfStatus | None = None  # what a look-up says


@dataclass(slots=True)
class Faults:
    """The faults that a test has planned, in the order it planned them."""

    planned: list[Fault] = field(default_factory=list)

    def plan(self, call: str, verdict: SendStatus | None, reason: str, fate: FaultKind, where: Where, times: int | None) -> None:
        """Add a fault behind those already planned."""
        outcome = None if verdict is None else SendResult(verdict, reason=reason or f"{verdict} on demand")
        self.planned.append(Fault(call, outcome, fate, where, times))

    def plan_lookup(self, status: HalfStatus, where: Where, times: int | None) -> None:
        """Add a fault of look-ups behind those already planned."""
        self.planned.append(Fault("look_up_halves", None, FaultKind.LOST, where, times, status))

    def take(self, call: str, message: Handed) -> Fault | None:
        """Return the first planned fault that meets this message, and count it down."""
        for fault in self.planned:
            if fault.call == call and fault.where(message):
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times <= 0:
                        self.planned.remove(fault)
                return fault
        return None

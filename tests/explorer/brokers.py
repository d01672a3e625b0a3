"""The seam at a broker that is not in the database: each call is a step, and requests and answers may be lost or late."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from outbox.brokers.base import Delivery, HalfRef, HalfStatus, Outgoing, SendResult, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.errors import BrokerUnavailable
from outbox.message import Half, Resolution
from tests.explorer.scheduler import Fault, current

R = TypeVar("R")

CALL_FAULTS = (Fault.LOST_REQUEST, Fault.LOST_REPLY, Fault.KILL)
TRANSACTION_FAULTS = (*CALL_FAULTS, Fault.LATE)  # a repeated one is recognized
SEND_FAULTS = (*TRANSACTION_FAULTS, Fault.TWICE)


class SteppedMemoryBroker(MemoryBroker):
    """The memory broker; an actor stops before each of its calls."""

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        return self._sent("send", _orders(messages), lambda: super(SteppedMemoryBroker, self).send(messages))

    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        return self._sent("send_halves", _orders(messages), lambda: super(SteppedMemoryBroker, self).send_halves(messages))

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        def end() -> list[SendResult]:
            return super(SteppedMemoryBroker, self).end(halves, resolution, within=within)

        return self._sent("end", f"{resolution}, {len(halves)} halves", end)

    def send_transaction(self, lane: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        def send() -> list[SendResult]:
            return super(SteppedMemoryBroker, self).send_transaction(lane, messages, marker)

        return self._sent("send_transaction", f"lane {lane}, {_orders(messages)}", send)

    def open_lane(self, source: str, lane: int) -> str | None:
        return self._called(f"open_lane({lane})", lambda: super(SteppedMemoryBroker, self).open_lane(source, lane))

    def look_up_halves(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        try:
            return self._called("look_up_halves", lambda: super(SteppedMemoryBroker, self).look_up_halves(halves))
        except BrokerUnavailable:
            return [HalfStatus.UNKNOWN] * len(halves)

    def check_halves(self, ask: Callable[[Half], Resolution], *, limit: int = 100) -> int:
        def ask_and_answer(half: Half) -> Resolution:
            answer = ask(half)
            return self._called(f"answer({answer})", lambda: answer)

        return self._called("check_halves", lambda: super(SteppedMemoryBroker, self).check_halves(ask_and_answer, limit=limit))

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        def receive() -> list[Delivery]:
            return super(SteppedMemoryBroker, self).receive(group, topics, limit=limit, invisible_for=invisible_for, wait=wait)

        return self._called("receive", receive)

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return self._called("ack", lambda: super(SteppedMemoryBroker, self).ack(deliveries))

    def release(self, deliveries: Sequence[Delivery]) -> None:
        return self._called("release", lambda: super(SteppedMemoryBroker, self).release(deliveries))

    def refuse_once(self, order: int) -> None:
        """Refuse the message of an order the first time that it is sent, in whichever way."""
        for call in ("send", "send_halves", "send_transaction"):
            self.fail(call, SendStatus.REFUSED, where=lambda one: isinstance(one, Outgoing) and order_of(one.body) == order)

    def _sent(self, call: str, what: str, act: Callable[[], list[SendResult]]) -> list[SendResult]:
        """Make a call whose answer says what became of each message; faults are those that the memory broker plans."""
        actor = current()
        if actor is None:
            return act()
        faults = TRANSACTION_FAULTS if call == "send_transaction" else SEND_FAULTS
        fault = actor.stop(f"broker.{call}({what})", faults, is_decisive=True)
        planned = self._store.faults
        before = list(planned)
        if fault is Fault.TWICE:
            planned.clear()
            self.duplicate(call, times=None)
        elif fault:
            planned.clear()
            self.fail(call, SendStatus.UNSURE, times=None, stored=fault is Fault.LOST_REPLY, late=fault is Fault.LATE)
        try:
            results = act()
        finally:
            if fault:
                planned[:] = before
        actor.step.outcome = ", ".join(dict.fromkeys(str(one.ended or one.status) for one in results))
        return results

    def _called(self, label: str, act: Callable[[], R]) -> R:
        actor = current()
        if actor is None:
            return act()
        fault = actor.stop(f"broker.{label}", CALL_FAULTS, is_decisive=True)
        if fault is Fault.LOST_REQUEST:
            raise BrokerUnavailable("The request was lost.")
        result = act()
        if fault is Fault.LOST_REPLY:
            raise BrokerUnavailable("The answer was lost.")
        if isinstance(result, list | int | bool):
            actor.step.outcome = str(len(result)) if isinstance(result, list) else str(result)
        return result


def _orders(messages: Sequence[Outgoing]) -> str:
    return ", ".join(f"order {order_of(one.body)}" for one in messages)


def order_of(body: bytes | memoryview) -> int:
    """Return the number of the order in the body of a message."""
    found: dict[str, Any] = msgspec.json.decode(bytes(body))
    return int(found["order"])

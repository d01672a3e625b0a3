"""Methods of the memory broker for tests: they plan faults, move the time, and inspect the store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from outbox.brokers.base import Ended, HalfStatus, Outgoing, SendResult, SendStatus
from outbox.brokers.memory import receiver
from outbox.brokers.memory.faults import Fault, FaultKind, Item, Where
from outbox.brokers.memory.store import HalfRecord, Store
from outbox.message import Half

LOOK_UP = "look_up_halves"
CALLS = ("send", "send_halves", "end", "send_transaction", LOOK_UP)
REPEATABLE_CALLS = ("send", "send_halves", "end")  # not `send_transaction`, since a repeated transaction is recognized


def _every_message(message: Item) -> bool:
    return True


class Controls:
    """Methods for tests, over the store of a broker."""

    _store: Store
    _now: Callable[[], datetime]

    def fail(
        self,
        call: str,
        verdict: SendStatus | HalfStatus | str,
        *,
        times: int | None = 1,
        where: Where = _every_message,
        stored: bool = False,
        late: bool = False,
        reason: str = "",
    ) -> None:
        """
        Plan a fault: the next messages (or half messages) of a call get this result.

        Args:
            call: send, send_halves, end, send_transaction (which fails as a whole) or look_up_halves.
            verdict: a status or its value, for example "unavailable". For look_up_halves, the status that is returned instead of
                the true one; any `SendStatus` makes it "unknown".
            times: how many messages (not calls) fail; None: all, until `heal()`.
            where: a function that returns True for messages that fail; by default all.
            reason: the reason in the result.
            stored: whether the request arrives anyway, and only the answer is lost.
            late: whether the request arrives when `deliver_late()` is called.
        """
        if call not in CALLS:
            raise ValueError(f"{call!r} cannot fail. Choices are: {', '.join(CALLS)}.")
        if call == LOOK_UP:
            self._store.faults.append(Fault(call, None, FaultKind.LOST, where, times, _status(verdict)))
            return
        if verdict not in list(SendStatus):
            raise ValueError(f"{verdict!r} is not a status. Choices are: {', '.join(SendStatus)}.")
        kind = FaultKind.LATE if late else FaultKind.STORED if stored else FaultKind.LOST
        result = SendResult(SendStatus(verdict), reason=reason or f"{verdict} on demand")
        self._store.faults.append(Fault(call, result, kind, where, times))

    def duplicate(self, call: str, *, times: int | None = 1, where: Where = _every_message) -> None:
        """Deliver a request of `send`, `send_halves` or `end` twice."""
        if call not in REPEATABLE_CALLS:
            raise ValueError(f"{call!r} cannot arrive twice. Choices are: {', '.join(REPEATABLE_CALLS)}.")
        self._store.faults.append(Fault(call, None, FaultKind.TWICE, where, times))

    def heal(self) -> None:
        """Remove all planned faults."""
        self._store.faults.clear()

    def deliver_late(self) -> int:
        """Deliver the requests that are still in flight; return their number."""
        with self._store.changed:
            in_flight, self._store.late[:] = list(self._store.late), []
            for arrive in in_flight:
                arrive()
            return len(in_flight)

    def undecided(self) -> list[Half]:
        """Return the half messages that were neither committed nor rolled back, as in check-backs about them."""
        with self._store.changed:
            return [check_back_of(half) for half in self._store.halves.values() if half.ended is None]

    def discard_halves(self, where: Where = _every_message) -> int:
        """Discard undecided half messages, as a broker does after its last check; return their number."""
        with self._store.changed:
            chosen = [half for half in self._store.halves.values() if half.ended is None and where(half.message)]
            for half in chosen:
                half.ended = Ended.DISCARDED
            return len(chosen)

    def show(self, message: Outgoing) -> None:
        """Deliver a message to all groups, as if it had been sent and committed."""
        with self._store.changed:
            self._store.show(message, self._now())

    def age(self, by: timedelta) -> None:
        """Make everything that the broker stores older, by moving all stored times back."""
        with self._store.changed:
            for half in self._store.halves.values():
                half.born_at, half.due_at = half.born_at - by, half.due_at - by
            for copy in (copy for topic in self._store.copies.values() for copy in topic):
                copy.stored_at, copy.visible_at = copy.stored_at - by, copy.visible_at - by
            for group in self._store.groups.values():
                for entry in (entry for topic in group.unfinished.values() for entry in topic.values()):
                    entry.due_at -= by
            self._store.changed.notify_all()

    def give_up(self, group: str, message: Outgoing, reason: str) -> None:
        """Move a message to a group's dead-letter queue, as a server does after too many deliveries."""
        with self._store.changed:
            known_group = receiver.join(self._store, group, [message.topic], at_end=False)
            receiver.read_new(self._store, known_group, message.topic)
            for entry in known_group.unfinished[message.topic].values():
                if entry.copy.message.message_id == message.message_id:
                    entry.dead_letter_reason, entry.receipt = reason, ""

    def copies(self, message_id: str) -> int:
        """Return the number of visible copies of a message; 1 means exactly once."""
        with self._store.changed:
            topics = self._store.copies.values()
            return sum(copy.message.message_id == message_id for topic in topics for copy in topic)

    def visible(self, topic: str) -> list[Outgoing]:
        """Return the visible messages of a topic, in storage order."""
        with self._store.changed:
            return [copy.message for copy in self._store.copies.get(topic, [])]

    def halves(self) -> list[HalfRecord]:
        """Return all half messages ever stored, including ended ones, in storage order."""
        with self._store.changed:
            return list(self._store.halves.values())


def _status(verdict: SendStatus | HalfStatus | str) -> HalfStatus:
    if verdict in list(HalfStatus):
        return HalfStatus(verdict)
    if verdict not in list(SendStatus):
        raise ValueError(f"{verdict!r} is not a status. Choices are: {', '.join([*HalfStatus, *SendStatus])}.")
    return HalfStatus.UNKNOWN


def check_back_of(half: HalfRecord) -> Half:
    """Return the content of a check-back about a half message."""
    message = half.message
    return Half(
        topic=message.topic,
        message_id=message.message_id,
        half_id=half.id,
        token=message.token,
        asked=half.asked,
        born_at=half.born_at,
        key=message.key,
        headers=dict(message.headers),
        body=message.body,
    )

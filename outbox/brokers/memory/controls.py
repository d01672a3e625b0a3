"""What a test does to the memory broker, and what it asks it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from outbox.brokers.base import Ended, HalfStatus, Outgoing, SendStatus
from outbox.brokers.memory.faults import FaultKind, Handed, Where
from outbox.brokers.memory.store import HalfRecord, Place, Store
from outbox.message import Half

LOOK_UP = "look_up_halves"
CALLS = ("send", "send_halves", "end", "send_transaction", LOOK_UP)
TWICE = ("send", "send_halves", "end")  # a transaction is told from its repeat


def _all(message: Handed) -> bool:
    return True


class Controls:
    """Faults on demand and counts, over the store of a broker."""

    _store: Store
    _now: Callable[[], datetime]

    def fail(
        self,
        call: str,
        verdict: SendStatus | HalfStatus | str,
        *,
        times: int | None = 1,
        where: Where = _all,
        stored: bool = False,
        late: bool = False,
        reason: str = "",
    ) -> None:
        """
        Answer messages (or halves) of a call with this verdict.

        Args:
            call: send, send_halves, end, send_transaction (which fails as a whole) or look_up_halves.
            verdict: or its value: "unavailable". Of look_up_halves what it says instead of the truth, or trouble: "unknown".
            times: so many messages, not calls; None for all, until `heal()`.
            where: only those for which it says True.
            stored: the request arrives all the same and only the answer is lost.
            late: the request arrives when `deliver_late()` is called.
        """
        if call not in CALLS:
            raise ValueError(f"{call!r} cannot fail. What can: {', '.join(CALLS)}.")
        if call == LOOK_UP:
            self._store.faults.plan_lookup(_status(verdict), where, times)
            return
        if verdict not in list(SendStatus):
            raise ValueError(f"{verdict!r} is no verdict. There are: {', '.join(SendStatus)}.")
        fate = FaultKind.LATE if late else FaultKind.STORED if stored else FaultKind.LOST
        self._store.faults.plan(call, SendStatus(verdict), reason, fate, where, times)

    def duplicate(self, call: str, *, times: int | None = 1, where: Where = _all) -> None:
        """Deliver a request of `send`, `send_halves` or `end` twice."""
        if call not in TWICE:
            raise ValueError(f"{call!r} cannot arrive twice. What can: {', '.join(TWICE)}.")
        self._store.faults.plan(call, None, "", FaultKind.TWICE, where, times)

    def heal(self) -> None:
        """Forget all planned faults."""
        self._store.faults.planned.clear()

    def deliver_late(self) -> int:
        """Deliver the requests that are still in flight; return their number."""
        with self._store.changed:
            under_way, self._store.late[:] = list(self._store.late), []
            for arrive in under_way:
                arrive()
            return len(under_way)

    def undecided(self) -> list[Half]:
        """Return the half messages that nobody has ended, as their broker will ask about them."""
        with self._store.changed:
            return [question(half) for half in self._store.halves.values() if half.ended is None]

    def discard_halves(self, where: Where = _all) -> int:
        """Discard undecided half messages, as a broker does after its last check; return their number."""
        with self._store.changed:
            lost = [half for half in self._store.halves.values() if half.ended is None and where(half.message)]
            for half in lost:
                half.ended = Ended.DISCARDED
            return len(lost)

    def show(self, message: Outgoing) -> None:
        """Deliver a message to all groups, as if it had been sent and committed."""
        with self._store.changed:
            self._store.show(message, self._now())

    def age(self, by: timedelta) -> None:
        """Put everything that the broker holds back in time, as if so much had passed since."""
        with self._store.changed:
            for half in self._store.halves.values():
                half.born_at, half.due_at = half.born_at - by, half.due_at - by
            for copy in (copy for topic in self._store.copies.values() for copy in topic):
                copy.stored_at, copy.visible_at = copy.stored_at - by, copy.visible_at - by
            for group in self._store.groups.values():
                for place in (place for topic in group.unfinished.values() for place in topic.values()):
                    place.due_at -= by
            self._store.changed.notify_all()

    def repeat_delivery(self, message_id: str) -> int:
        """Deliver a message once more to every group that finished or holds it; return to how many."""
        with self._store.changed:
            repeated = 0
            for group in self._store.groups.values():
                for copy in group.done.pop(message_id, []):
                    group.unfinished[copy.message.topic][copy.number] = Place(copy, self._now(), attempt=1)
                    repeated += 1
            self._store.changed.notify_all()
            return repeated

    def copies(self, message_id: str) -> int:
        """Count the visible copies of a message: 1 is exactly once."""
        with self._store.changed:
            topics = self._store.copies.values()
            return sum(copy.message.message_id == message_id for topic in topics for copy in topic)

    def visible(self, topic: str) -> list[Outgoing]:
        """Return what a topic shows, in storage order."""
        with self._store.changed:
            return [copy.message for copy in self._store.copies.get(topic, [])]

    def halves(self) -> list[HalfRecord]:
        """Return all half messages ever stored, ended ones too, in storage order."""
        with self._store.changed:
            return list(self._store.halves.values())

    def handed_out(self, group: str, message_id: str) -> int:
        """Count how often a group was handed a message."""
        with self._store.changed:
            known = self._store.groups.get(group)
            return known.handed_out.count(message_id) if known else 0


def _status(verdict: SendStatus | HalfStatus | str) -> HalfStatus:
    if verdict in list(HalfStatus):
        return HalfStatus(verdict)
    if verdict not in list(SendStatus):
        raise ValueError(f"{verdict!r} is no verdict. There are: {', '.join([*HalfStatus, *SendStatus])}.")
    return HalfStatus.UNKNOWN


def question(half: HalfRecord) -> Half:
    """Ask about a half message."""
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

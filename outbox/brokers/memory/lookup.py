"""Looking messages and half messages up in what the memory broker holds."""

from __future__ import annotations

from datetime import datetime

from outbox.brokers.base import Ended, EndSemantics, HalfRef, HalfStatus, StoredCopy
from outbox.brokers.memory.ends import half_of, takes_end
from outbox.brokers.memory.store import Copy, Store
from outbox.message import COMMIT, Header


def find(store: Store, message_id: str, now: datetime) -> list[StoredCopy]:
    """Return a message as half messages that did not become visible, and as visible copies."""
    halves = [half for half in store.halves.values() if half.message.message_id == message_id]
    copies = [copy for topic in store.copies.values() for copy in topic if copy.message.message_id == message_id]
    dead = [copy for group in store.groups.values() for _, copy in group.dead.values()]
    hidden = [
        StoredCopy(message_id, half.message.topic, half.ended or "half", half.id, half.born_at)
        for half in halves
        if half.ended is not Ended.COMMITTED
    ]
    shown = [StoredCopy(message_id, copy.message.topic, _state(copy, dead, now), stored_at=copy.stored_at) for copy in copies]
    return hidden + shown


def stand(store: Store, ref: HalfRef, semantics: EndSemantics) -> HalfStatus:
    """Return where a half message stands. Nothing is ever dropped here, so what is not found never was visible."""
    if any(_is_of(copy, ref) for copy in store.copies.get(ref.topic, ())):
        return HalfStatus.VISIBLE
    half = half_of(store, ref)
    return HalfStatus.HIDDEN if half and takes_end(half, COMMIT, semantics) else HalfStatus.GONE


def _is_of(copy: Copy, ref: HalfRef) -> bool:
    source = copy.message.headers.get(Header.SOURCE, "")
    return copy.message.message_id == ref.message_id and ref.source in ("", source)


def _state(copy: Copy, dead: list[Copy], now: datetime) -> str:
    return "dead_letter" if copy in dead else "delayed" if copy.visible_at > now else "visible"

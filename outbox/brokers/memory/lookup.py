"""Look-ups of messages and half messages in the memory broker."""

from __future__ import annotations

from datetime import datetime

from outbox.brokers.base import Ended, EndSemantics, HalfRef, HalfStatus, StoredCopy
from outbox.brokers.memory.store import Copy, Store
from outbox.message import Header


def find(store: Store, message_id: str, now: datetime) -> list[StoredCopy]:
    """Return the copies of a message: half messages that were not committed, and visible copies."""
    halves = [half for half in store.halves.values() if half.message.message_id == message_id]
    copies = [copy for topic in store.copies.values() for copy in topic if copy.message.message_id == message_id]
    hidden = [
        StoredCopy(message_id, half.message.topic, half.ended or "half", half.id, half.born_at)
        for half in halves
        if half.ended is not Ended.COMMITTED
    ]
    shown = [
        StoredCopy(message_id, copy.message.topic, "delayed" if copy.visible_at > now else "visible", stored_at=copy.stored_at)
        for copy in copies
    ]
    return hidden + shown


def look_up_half(store: Store, ref: HalfRef, semantics: EndSemantics) -> HalfStatus:
    """Return the status of a half message. The store is never pruned, so a message that is not found was never visible."""
    if any(_is_of(copy, ref) for copy in store.copies.get(ref.topic, ())):
        return HalfStatus.VISIBLE
    half = store.half_of(ref)
    may_be_ended = half is not None and (half.ended is None or semantics is EndSemantics.STATELESS)
    return HalfStatus.HIDDEN if may_be_ended else HalfStatus.GONE


def _is_of(copy: Copy, ref: HalfRef) -> bool:
    source = copy.message.headers.get(Header.SOURCE, "")
    return copy.message.message_id == ref.message_id and ref.source in ("", source)

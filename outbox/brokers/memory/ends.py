"""Ends of half messages, with the two semantics of a second end."""

from __future__ import annotations

from datetime import datetime

from outbox.brokers.base import Ended, EndSemantics, HalfRef
from outbox.brokers.memory.store import HalfRecord, Store
from outbox.message import Resolution


def half_of(store: Store, ref: HalfRef) -> HalfRecord | None:
    """Return the half message of a reference; None if it never existed, or its place has another one."""
    half = store.halves.get(ref.half_id)
    return half if half and ref.place in ("", str(half.place)) else None


def end_half(store: Store, half: HalfRecord | None, resolution: Resolution, semantics: EndSemantics, now: datetime) -> Ended:
    """Commit or roll back one half message as a broker with these semantics does; return its answer."""
    if half is None:
        return Ended.NOT_FOUND
    if half.ended is None or semantics is EndSemantics.STATELESS:
        half.ended = Ended.COMMITTED if resolution is Resolution.COMMIT else Ended.ROLLED_BACK
        if resolution is Resolution.COMMIT:
            store.show(half.message, now)
    return half.ended

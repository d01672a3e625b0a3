"""The four ways in which brokers treat a second end of one half message."""

from __future__ import annotations

from datetime import datetime

from outbox.brokers.base import Ended, EndSemantics
from outbox.brokers.memory.store import HalfRecord, Store
from outbox.message import Resolution


def end_half(store: Store, half: HalfRecord | None, resolution: Resolution, semantics: EndSemantics, now: datetime) -> Ended:
    """Commit or roll back one half message as a broker of these semantics does; give what it answers."""
    if half is None:
        return Ended.NOT_FOUND
    first = half.ended
    if first is None or semantics is EndSemantics.STATELESS:
        return _act(store, half, resolution, now)
    if semantics is EndSemantics.FORGETFUL:
        return Ended.NOT_FOUND
    if semantics is EndSemantics.DUPLICATING and first is Ended.COMMITTED and resolution is Resolution.COMMIT:
        return _act(store, half, resolution, now)
    return first


def _act(store: Store, half: HalfRecord, resolution: Resolution, now: datetime) -> Ended:
    half.ended = Ended.COMMITTED if resolution is Resolution.COMMIT else Ended.ROLLED_BACK
    if resolution is Resolution.COMMIT:
        store.show(half.message, now)
    return half.ended

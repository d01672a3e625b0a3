"""Looking a message up in what the memory broker holds."""

from __future__ import annotations

from datetime import datetime

from outbox.brokers.base import Ended, StoredCopy
from outbox.brokers.memory.store import Copy, Store


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


def _state(copy: Copy, dead: list[Copy], now: datetime) -> str:
    return "dead_letter" if copy in dead else "delayed" if copy.visible_at > now else "visible"

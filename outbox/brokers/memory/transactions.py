"""Transactional sends: messages and a marker in one transaction, by the holder of a lane."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.memory.store import MemoryLane, Store


def open_lane(store: Store, number: int, holder: object) -> str | None:
    """Make a broker the holder of a lane; return the lane's marker."""
    lane = store.lanes.setdefault(number, MemoryLane())
    lane.holder = holder
    return lane.marker


def commit(
    store: Store,
    number: int,
    holder: object,
    messages: Sequence[Outgoing],
    rejections: Sequence[SendResult | None],
    marker: str,
    now: datetime,
) -> list[SendResult]:
    """Make all messages visible and set the marker, or do nothing."""
    lane = store.lanes.get(number)
    if lane is None or lane.holder is not holder:
        return _unavailable(messages, f"Lane {number} is not open here, or was taken over. Open it again.")
    if any(rejections):
        others = _unavailable(messages, "Another message of its transaction was rejected. It is sent again.")
        return [rejection or other for rejection, other in zip(rejections, others, strict=True)]
    for message in messages:
        store.show(message, now)
    lane.marker = marker
    return [SendResult(SendStatus.ACCEPTED)] * len(messages)


def _unavailable(messages: Sequence[Outgoing], reason: str) -> list[SendResult]:
    return [SendResult(SendStatus.UNAVAILABLE, reason=reason)] * len(messages)

"""Transactional sends: messages and a marker in one transaction, by the holder of a lane."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.memory.store import LaneKey, MemoryLane, Store


def fence(store: Store, key: LaneKey) -> MemoryLane:
    """Begin a new epoch of a lane, whose holder can then commit nothing more; return the lane."""
    lane = store.lanes.setdefault(key, MemoryLane())
    lane.epoch += 1
    return lane


def commit(
    store: Store,
    key: LaneKey,
    epoch: int,
    messages: Sequence[Outgoing],
    rejections: Sequence[SendResult | None],
    marker: str,
    now: datetime,
) -> list[SendResult]:
    """Make all messages visible and set the marker, or do nothing."""
    lane = store.lanes[key]
    if lane.epoch != epoch:
        return unavailable(messages, f"Lane {key.lane} was taken over. Open it again.")
    if any(rejections):
        others = unavailable(messages, "Another message of its transaction was rejected. It is sent again.")
        return [rejection or other for rejection, other in zip(rejections, others, strict=True)]
    for message in messages:
        store.show(message, now)
    lane.marker = marker
    return [SendResult(SendStatus.ACCEPTED)] * len(messages)


def unavailable(messages: Sequence[Outgoing], reason: str) -> list[SendResult]:
    """Return results of messages that are not stored."""
    return [SendResult(SendStatus.UNAVAILABLE, reason=reason)] * len(messages)

"""Batches in the memory of a relay, made from stored ones."""

from typing import Any

from outbox.batches.batch import BatchSendResult, ClaimedBatch, PreparedBatch, SplitReason, Unaccepted
from outbox.message import TopicType
from outbox.models import Batch as StoredBatch
from outbox.models import Topic
from tests.factories import BatchFactory


def claimed(row: StoredBatch, **changes: Any) -> ClaimedBatch:
    """Return the `ClaimedBatch` of a claimed row."""
    topic = Topic.objects.get(pk=row.topic_id)
    fields = {
        "id": row.id,
        "attempt": row.attempt,
        "topic": topic.name,
        "type": TopicType(topic.type),
        "lane": row.lane,
        "first_seq": row.first_seq,
        "message_ids": [str(message_id) for message_id in row.message_ids],
        "order_keys": row.order_keys,
        "split": frozenset(row.split),
        "failures": row.failures,
    }
    return ClaimedBatch(**fields | changes)


def make_claimed(**fields: Any) -> ClaimedBatch:
    """Store a claimed batch; return its `ClaimedBatch`."""
    return claimed(BatchFactory(**fields))


def decided(row: StoredBatch, **changes: Any) -> PreparedBatch:
    """Return the `PreparedBatch` of a decided row."""
    batch = claimed(row)
    positions = [position for position in batch.positions if row.open is None or position in row.open]
    fields = {
        "id": batch.id,
        "attempt": batch.attempt,
        "topic": batch.topic,
        "message_ids": batch.message_ids,
        "half_ids": row.half_ids,
        "positions": positions,
        "failures": row.failures,
        "half_places": {p: place for p, place in enumerate(row.half_places or [], 1) if place},
        "decided_at": row.decided_at,
    }
    return PreparedBatch(**fields | changes)


def result_of(batch: ClaimedBatch, *, accepted: dict[int, str] | None = None, **fates: int | list[int]) -> BatchSendResult:
    """Return the result of sending a batch: result_of(batch, accepted={1: "half"}, refused=2, unsure=[3, 4])."""
    unaccepted = {}
    for fate, positions in fates.items():
        for position in [positions] if isinstance(positions, int) else positions:
            unaccepted[position] = Unaccepted(SplitReason(fate), f"{fate}, says the broker")
    return BatchSendResult(batch, accepted or {}, unaccepted)


def children(batch: ClaimedBatch | StoredBatch) -> list[StoredBatch]:
    """Return the batches that were split off, in the order they are claimed again."""
    return list(StoredBatch.objects.exclude(pk=batch.id).order_by("id"))

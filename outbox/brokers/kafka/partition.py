"""
A partition at the member of a consumer group that reads it: the records that were fetched and not acknowledged.

Kafka stores one offset for each partition of a group: all records before it are finished. So the offset to commit is that of the
first record that is not acknowledged, even if later ones are. Records that are released or expire are handed out again, the first
one first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from confluent_kafka import Message


class HeldPartition(msgspec.Struct, eq=False):
    """
    The records of a partition, from its assignment to its revocation.

    Args:
        position: the offset after the last record that was fetched, or where reading begins. None: unknown.
        committed: the committed offset, below 0 if there is none. None: not read yet.
        committed_bound: the bound in the metadata of the committed offset: only records before it may be handed out. 0: the
            partition is not in use. See `receiver.py`.
        is_in_use: whether the next commit sets a bound for records that are still to be handed out.
        handed_out_before: records before this offset may have been handed out already, here or by an earlier holder.
        records: offset -> record that is not acknowledged, in the order of the offsets.
        held: offset -> receipt of a record that is handed out.
        held_until: when all held records expire, by the member's clock.
        changed_at: when a record last arrived or was acknowledged, by `monotonic`.
        topic_id: the id of the topic of these records and offsets. "": unknown.
    """

    topic: str
    number: int
    is_ordered: bool
    position: int | None = None
    committed: int | None = None
    committed_bound: int = 0
    is_in_use: bool = False
    handed_out_before: int = 0
    records: dict[int, Message] = msgspec.field(default_factory=dict)
    held: dict[int, str] = msgspec.field(default_factory=dict)
    held_until: float = 0.0
    changed_at: float = 0.0
    topic_id: str = ""
    is_paused: bool = False

    @property
    def first_unacknowledged(self) -> int | None:
        """The offset of the first record that is not acknowledged, which is the offset to commit. None: unknown."""
        return next(iter(self.records), self.position)

    def add(self, record: Message, now: float) -> None:
        """Add the next record of the partition."""
        offset = record.offset() or 0
        if offset < (self.position or 0):  # the topic was deleted and created again
            self.restart_at(offset)
        self.records[offset] = record
        self.position, self.changed_at = offset + 1, now

    def restart_at(self, offset: int) -> None:
        """Drop all records and offsets, which belong to a deleted topic, and begin at this offset of the new topic."""
        self.records.clear()
        self.held.clear()
        self.position, self.committed, self.committed_bound, self.handed_out_before = offset, -1, 0, 0

    def ready_offsets(self, limit: int) -> Iterator[int]:
        """
        Yield the offsets of records that can be handed out now: those below the committed bound that are not held.

        In an ordered partition, there are none while any record is held.
        """
        if self.is_ordered and self.held:
            return
        end = min(self.committed_bound, (self.committed or 0) + limit)
        for offset in self.records:
            if offset >= end:
                return
            if offset not in self.held:
                yield offset

    def waits_for_commit(self, limit: int) -> bool:
        """Return whether a new offset and bound must be committed before the next record can be handed out."""
        if self.is_ordered and self.held:
            return False
        following = next((offset for offset in self.records if offset not in self.held), None)
        first = self.first_unacknowledged
        return (
            following is not None
            and first is not None
            and following < first + limit
            and next(self.ready_offsets(limit), None) is None
        )

    def hold(self, offset: int, receipt: str) -> int:
        """Hold a record for its handler. Return its delivery count: 1 only if it was certainly not handed out before."""
        self.held[offset] = receipt
        if offset < self.handed_out_before:
            return 2
        self.handed_out_before = offset + 1
        return 1

    def bound_to_commit(self, limit: int) -> int:
        """Return the bound for the metadata of the next commit; 0 if no record from the first unacknowledged one on needs it."""
        first = self.first_unacknowledged or 0
        bound = max(self.handed_out_before, first + limit if self.is_in_use else 0)
        return bound if bound > first else 0

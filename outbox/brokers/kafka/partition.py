"""
A partition that a member of a consumer group reads, with the records that the member has fetched and not acknowledged.

Kafka stores one offset for each partition of a group, which says that all records before it are finished. So the offset to commit
is that of the first record that is not acknowledged, even if later ones are. Records that were released, or whose hold has
expired, are handed out again in the order of their offsets.
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
        position: the offset from which the next record is fetched. None: unknown.
        committed: the group's committed offset; below 0 if there is none. None: unknown, so it has to be read first.
        committed_bound: the bound that was committed with this offset: only records before the bound may be handed out. 0: no
            bound was committed, so nothing may be handed out until one is. See DELIVERY COUNTS in `receiver.py`.
        sets_bound_ahead: True: commits set the bound one batch after the first unacknowledged record, so that this batch may be
            handed out. False: commits set it after the last record that was handed out.
        handed_out_before: each record before this offset counts as redelivered, since it may have been handed out, by this member
            or an earlier one.
        records: offset -> record that is not acknowledged, in the order of the offsets.
        held: offset -> receipt, for each of these records that is handed out now.
        held_until: when the holds of all held records expire, by `GroupMember`'s argument `clock`.
        changed_at: when a record last arrived or was acknowledged, by `time.monotonic`; tells whether the partition is idle.
        topic_id: the id of the topic of these records and offsets, which a new topic of the same name does not have. "": unknown.
    """

    topic: str
    number: int
    is_ordered: bool
    position: int | None = None
    committed: int | None = None
    committed_bound: int = 0
    sets_bound_ahead: bool = False
    handed_out_before: int = 0
    records: dict[int, Message] = msgspec.field(default_factory=dict)
    held: dict[int, str] = msgspec.field(default_factory=dict)
    held_until: float = 0.0
    changed_at: float = 0.0
    topic_id: str = ""
    is_paused: bool = False

    @property
    def first_unacknowledged(self) -> int | None:
        """The offset to commit: that of the first unacknowledged record; without any, the position. None: unknown."""
        return next(iter(self.records), self.position)

    def add(self, record: Message, now: float) -> None:
        """Add the next record of the partition."""
        offset = record.offset() or 0
        if offset < (self.position or 0):  # the topic was deleted and created again
            self.restart_at(offset)
        self.records[offset] = record
        self.position, self.changed_at = offset + 1, now

    def restart_at(self, offset: int) -> None:
        """Drop the records and offsets of a deleted topic, and begin at this offset of the topic that was created again."""
        self.records.clear()
        self.held.clear()
        self.position, self.committed, self.committed_bound, self.handed_out_before = offset, -1, 0, 0

    def ready_offsets(self, limit: int) -> Iterator[int]:
        """
        Yield the offsets of records that can be handed out now: they are not held, and are before the committed bound.

        In an ordered partition, there are none while any record is held.

        Args:
            limit: only records that are fewer than this number of offsets after the committed one.
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
        """Return whether a new offset and bound must be committed before another record can be handed out within the limit."""
        if self.is_ordered and self.held:
            return False
        next_offset = next((offset for offset in self.records if offset not in self.held), None)
        first = self.first_unacknowledged
        return (
            next_offset is not None
            and first is not None
            and next_offset < first + limit
            and next(self.ready_offsets(limit), None) is None
        )

    def hold(self, offset: int, receipt: str) -> int:
        """Hold a record for its handler. Return its delivery count: 1 if it was certainly not handed out before, otherwise 2."""
        self.held[offset] = receipt
        if offset < self.handed_out_before:
            return 2
        self.handed_out_before = offset + 1
        return 1

    def bound_to_commit(self, limit: int) -> int:
        """
        Return the bound to commit with the first unacknowledged offset.

        0: no bound, since no record from that offset on was handed out, and none is to be.
        """
        first = self.first_unacknowledged or 0
        bound = max(self.handed_out_before, first + limit if self.sets_bound_ahead else 0)
        return bound if bound > first else 0

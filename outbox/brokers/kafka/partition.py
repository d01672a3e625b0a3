"""
A partition as its holder has it: the records that were fetched and not acknowledged.

Kafka knows one offset for each partition of a group: everything before it is finished. Records that are acknowledged out of order
leave the others where they are, and those that are released or expire are handed out again from the first one on.
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
        committed: the committed offset, below 0 where there is none. None: not read yet.
        in_use_until: as committed, the offset before which records may be handed out; 0: the partition is not in use.
        is_in_use: whether the next commit allows for records that are handed out.
        seen_before: records before this offset may have been handed out already, here or by an earlier holder.
        records: by offset, in their order.
        held: the records that are handed out: offset -> receipt.
        held_until: when all of them expire.
        changed_at: when a record last came or was acknowledged.
        topic_id: of the topic whose records and offsets these are. "": unknown.
    """

    topic: str
    number: int
    is_ordered: bool
    position: int | None = None
    committed: int | None = None
    in_use_until: int = 0
    is_in_use: bool = False
    seen_before: int = 0
    records: dict[int, Message] = msgspec.field(default_factory=dict)
    held: dict[int, str] = msgspec.field(default_factory=dict)
    held_until: float = 0.0
    changed_at: float = 0.0
    topic_id: str = ""
    is_paused: bool = False

    @property
    def first_open(self) -> int | None:
        """The offset to commit: that of the first record that is not acknowledged. None: unknown."""
        return next(iter(self.records), self.position)

    def add(self, record: Message, now: float) -> None:
        """Add the next record of the partition."""
        offset = record.offset() or 0
        if offset < (self.position or 0):  # of a topic that was deleted and created again
            self.begin_again(offset)
        self.records[offset] = record
        self.position, self.changed_at = offset + 1, now

    def begin_again(self, offset: int) -> None:
        """Forget all records and offsets, which are those of a topic that was deleted, and begin at an offset."""
        self.records.clear()
        self.held.clear()
        self.position, self.committed, self.in_use_until, self.seen_before = offset, -1, 0, 0

    def ready(self, limit: int) -> Iterator[int]:
        """Yield the offsets of records that can be handed out: none beyond the limit after the committed offset."""
        if self.is_ordered and self.held:
            return
        end = min(self.in_use_until, (self.committed or 0) + limit)
        for offset in self.records:
            if offset >= end:
                return
            if offset not in self.held:
                yield offset

    def waits_for_commit(self, limit: int) -> bool:
        """Return whether the next record can be handed out once the offset to commit and the flag *in use* are committed."""
        if self.is_ordered and self.held:
            return False
        following = next((offset for offset in self.records if offset not in self.held), None)
        first = self.first_open
        return following is not None and first is not None and following < first + limit and next(self.ready(limit), None) is None

    def hold(self, offset: int, receipt: str) -> int:
        """Hand a record out. Return its delivery count: 1 only if it was certainly not handed out before."""
        self.held[offset] = receipt
        if offset < self.seen_before:
            return 2
        self.seen_before = offset + 1
        return 1

    def note_until(self, limit: int) -> int:
        """Return the offset before which records may have been handed out, as the next commit has to say; 0: none."""
        first = self.first_open or 0
        until = max(self.seen_before, first + limit if self.is_in_use else 0)
        return until if until > first else 0

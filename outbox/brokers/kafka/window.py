"""
The records of one partition that a consumer group's member has fetched and not finished.

Kafka knows one offset for each partition of a group: everything before it is finished. So records that are finished out of order
are kept here until those before them are, and a record that is retried or held holds the offset back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from confluent_kafka import Message

MOST_OPEN = 500  # records of a partition; then it is paused
FEW_OPEN = MOST_OPEN // 2  # then it is resumed

_serials = itertools.count(1)


@dataclass(slots=True)
class FetchedRecord:
    """
    A record that was fetched.

    Args:
        due_at: by the member's clock, when the record may be handed out, or handed out again.
        retry_at: when its retry is due, on a retry topic; `due_at` may be earlier, since a long delay is spent in several steps.
        receipt: of its last delivery; "" where that has ended.
        handed_out: how often it was handed out here.
        is_passed_on: this process has no handler for it.
    """

    record: Message
    due_at: float = 0.0
    retry_at: float = 0.0
    receipt: str = ""
    handed_out: int = 0
    is_passed_on: bool = False
    is_finished: bool = False


@dataclass(slots=True)
class PartitionWindow:
    """
    The unfinished records of a partition, from its assignment to its revocation.

    Args:
        topic: the topic of its messages; a retry topic has those of another one.
        stored_topic, partition: where they are stored.
        handed_out_before: records before this offset may have been handed out by an earlier holder. None: not read yet.
        handed_out_until: the offset after the last record that was handed out here.
        noted_until: the offset up to which the committed offset's metadata allows for records that were handed out.
        committed: the offset that was committed last; None: unknown.
    """

    topic: str
    stored_topic: str
    partition: int
    is_ordered: bool
    is_retry: bool
    handed_out_before: int | None = None
    handed_out_until: int = 0
    noted_until: int = 0
    committed: int | None = None
    records: dict[int, FetchedRecord] = field(default_factory=dict)
    end: int | None = None  # the offset after the last record
    is_paused: bool = False
    serial: int = field(default_factory=lambda: next(_serials))

    def add(self, fetched: FetchedRecord) -> None:
        """Add a record, the next one of the partition."""
        offset = _offset(fetched)
        self.records[offset] = fetched
        self.end = offset + 1
        if fetched.is_finished:
            self.finish(fetched)

    def due(self, now: float) -> Iterator[FetchedRecord]:
        """Yield the records that can be handed out, in their order; of an ordered topic, the first unfinished one of each key."""
        waiting: set[bytes] = set()
        for fetched in self.records.values():
            if fetched.is_finished:
                continue
            key = fetched.record.key() if self.is_ordered else None
            if key is not None:
                if key in waiting:
                    continue
                waiting.add(key)
            if fetched.due_at <= now:
                yield fetched

    def finish(self, fetched: FetchedRecord) -> None:
        """Finish a record."""
        fetched.is_finished = True
        fetched.receipt = ""
        for offset, first in list(self.records.items()):
            if not first.is_finished:
                break
            del self.records[offset]

    def offset_to_commit(self) -> int | None:
        """Return the first offset that is not finished; None where nothing was fetched."""
        return next(iter(self.records), self.end)

    def should_pause(self, now: float) -> bool:
        """Return whether no further record should be fetched now."""
        if self.is_retry and any(fetched.due_at > now for fetched in self.records.values()):
            return True  # later ones are due later
        return len(self.records) >= (FEW_OPEN if self.is_paused else MOST_OPEN)

    def hand_out(self, fetched: FetchedRecord, until: float) -> int:
        """Hide a record until then, under a new receipt. Return how often it may have been handed out, this time included."""
        offset = _offset(fetched)
        fetched.handed_out += 1
        fetched.due_at = until
        fetched.receipt = f"{self.stored_topic}/{self.partition}/{offset}/{self.serial}.{fetched.handed_out}"
        self.handed_out_until = max(self.handed_out_until, offset + 1)
        return fetched.handed_out + int(offset < (self.handed_out_before or 0))


def _offset(fetched: FetchedRecord) -> int:
    offset: int | None = fetched.record.offset()
    assert offset is not None
    return offset

"""
One lane as the monitor knows it: sets of numbers, bucket by bucket, for the outbox and for each group. NumPy only.

Missing to the outbox is what was given out, below the highest number that is done, and neither sent nor explained (dead,
skipped). Missing to a group is what was sent, below the highest number that the group has handled, and neither handled nor
given up by it. What is under way is missing for a moment; what stays the first missing number is late, or lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from outbox.pipeline.spark.monitor.aggregate import Change
from outbox.pipeline.spark.transforms.numbers import BUCKET

Bits: TypeAlias = "npt.NDArray[np.bool_]"

OUTBOX = ""  # in the place of a group
SEEN_AS = {
    "sent": "sent",
    "explained": "explained",
    "handled": "handled",
    "dead letter": "given up",
    "discarded": "given up",
}
FAILED = ("retry", "dead letter")


@dataclass
class Numbers:
    """Numbers of a bucket in a role: which, and in how many rows."""

    bits: Bits = field(default_factory=lambda: np.zeros(BUCKET, bool))
    n: int = 0

    def add(self, bits: bytes, n: int) -> None:
        self.bits = self.bits | unpack(bits)
        self.n += n


@dataclass(frozen=True)
class Missing:
    """What is missing to the outbox, or a group, in a bucket."""

    bucket: int
    consumer_group: str
    count: int
    first: int | None


@dataclass
class Lane:
    """
    Args:
        first: the lane's numbers count from here on.
        highest: group -> highest number seen; `OUTBOX`: of the outbox.
        tops: the same as it was before the changes.
        buckets: bucket -> (role, group) -> numbers; those that are looked at.
    """

    first: int = 1
    highest: dict[str, int] = field(default_factory=dict)
    tops: dict[str, int] = field(default_factory=dict)
    buckets: dict[int, dict[tuple[str, str], Numbers]] = field(default_factory=dict)

    def raise_highest(self, changes: Iterable[Change]) -> None:
        """Note the highest numbers of changes."""
        self.tops = dict(self.highest)
        for one in changes:
            if one.role in SEEN_AS:
                self.highest[one.consumer_group] = max(one.highest, self.highest.get(one.consumer_group, 0))

    def buckets_in_doubt(self, changes: Iterable[Change]) -> set[int]:
        """Name the buckets in which something may be missing now, or no longer: changed ones, and those newly below a top."""
        found = {one.bucket for one in changes if one.bucket is not None and one.role in SEEN_AS}
        end = self.highest.get(OUTBOX, 0)  # beyond it nothing is expected of anybody
        for group, highest in self.highest.items():
            before = max(self.tops.get(group, self.first), self.first)
            if highest > before:
                found.update(range(bucket_of(before), bucket_of(min(highest, max(end, before))) + 1))
        return found

    def missing(self, groups: Iterable[str]) -> Iterator[Missing]:
        """Return for each bucket that is looked at what is missing to the outbox and to these groups."""
        for bucket, roles in self.buckets.items():
            numbers = np.arange(bucket * BUCKET + 1, (bucket + 1) * BUCKET + 1)

            def of(role: str, group: str, roles: dict[tuple[str, str], Numbers] = roles) -> Bits:
                return roles[role, group].bits if (role, group) in roles else np.zeros(BUCKET, bool)

            given_out = (numbers >= self.first) & (numbers <= self.highest.get(OUTBOX, 0))
            yield _missing(bucket, OUTBOX, given_out & ~of("sent", OUTBOX) & ~of("explained", OUTBOX))
            for group in groups:
                expected = of("sent", OUTBOX) & (numbers <= self.highest.get(group, 0))
                yield _missing(bucket, group, expected & ~of("handled", group) & ~of("given up", group))


def bucket_of(number: int) -> int:
    return (number - 1) // BUCKET


def pack(bits: Bits) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


def unpack(bits: bytes) -> Bits:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)


def _missing(bucket: int, group: str, wrong: Bits) -> Missing:
    places = np.flatnonzero(wrong)
    return Missing(bucket, group, len(places), bucket * BUCKET + 1 + int(places[0]) if len(places) else None)

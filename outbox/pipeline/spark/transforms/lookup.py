"""Look up rows of a stage by lane and number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.pipeline.spark.findings import FindingKind
from outbox.pipeline.spark.transforms.columns import Bools, Ints
from outbox.pipeline.spark.transforms.judge import runs_of
from outbox.pipeline.spark.transforms.numbers import BUCKET, HIGHEST, LaneName

LANE_SHIFT = 49
BEFORE_ALL = np.iinfo(np.int64).min


@dataclass
class NumberRanges:
    """Ranges of numbers by lane."""

    _spans: dict[LaneName, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, lane: LaneName, first: int, last: int) -> None:
        self._spans[lane].append((first, last))

    def index(self) -> Index:
        """Return an index for look-ups of millions of numbers."""
        codes = {lane: code for code, lane in enumerate(self._spans)}
        spans = [(code, first, last) for lane, code in codes.items() for first, last in _merged(self._spans[lane])]
        starts = np.array([(code << LANE_SHIFT) + first - 1 for code, first, _ in spans], np.int64)
        ends = np.array([(code << LANE_SHIFT) + last - 1 for code, _, last in spans], np.int64)
        return Index(codes, starts, ends)


@dataclass(frozen=True)
class Index:
    """Sorted ranges; lane and number are packed into one integer."""

    codes: Mapping[LaneName, int]
    starts: Ints
    ends: Ints

    def has(self, lanes: Ints, names: list[LaneName], numbers: Ints) -> Bools:
        """Return for each row whether its number is in a range. lanes: index into `names`, for each row."""
        found: Bools = np.zeros(len(numbers), bool)
        codes = np.array([self.codes.get(name, -1) for name in names], np.int64)
        if not len(self.starts) or not len(numbers) or (codes < 0).all():
            return found
        packed = (codes << LANE_SHIFT)[lanes] + numbers - 1
        span = np.searchsorted(self.starts, packed, "right") - 1
        hits = np.flatnonzero(packed <= np.append(self.ends, BEFORE_ALL)[span])
        found[hits[(numbers[hits] >= 1) & (numbers[hits] <= HIGHEST)]] = True
        return found


def _merged(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges in order; overlapping ones are merged."""
    first, last = 0, -1
    for a, b in sorted(spans):
        if a > last:
            if last >= first:
                yield first, last
            first = a
        last = max(last, b)
    if last >= first:
        yield first, last


def repeats(rows: pa.Table, *, ids: int) -> Iterator[dict[str, Any]]:
    """
    Yield the repeated numbers of a bucket, by kind: one message several times, or several messages of one number.

    Takes consumer_group, number, message_id of one lane and bucket. Yields consumer_group, kind, first, last, numbers (how many
    of first to last are repeated), n (superfluous rows, or messages that share a number), ids of the first ones.
    """
    keys = rows.group_by(["consumer_group", "number"]).aggregate([("message_id", "count"), ("message_id", "distinct")])
    keys = keys.filter(pc.greater(keys["message_id_count"], 1)).sort_by(
        [("consumer_group", "ascending"), ("number", "ascending")]
    )
    for group in keys["consumer_group"].unique().to_pylist():
        of_group = keys.filter(pc.equal(keys["consumer_group"], group)).to_pylist()
        for kind in FindingKind.DUPLICATED, FindingKind.RENUMBERED:
            found = [one for one in of_group if (len(one["message_id_distinct"]) == 1) == (kind is FindingKind.DUPLICATED)]
            for first, last, of_span in _spans(found):
                yield {
                    "consumer_group": group,
                    "kind": kind.value,
                    "first": first,
                    "last": last,
                    "numbers": len(of_span),
                    "n": sum(_too_many(kind, one) for one in of_span),
                    "ids": [one for row in of_span[:ids] for one in sorted(row["message_id_distinct"])[:ids]],
                }


def _spans(found: list[dict[str, Any]]) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """Yield ranges of consecutive numbers with their rows; one range if they are scattered."""
    if not found:
        return
    before = (found[0]["number"] - 1) // BUCKET * BUCKET + 1
    there: Bools = np.zeros(BUCKET, bool)
    there[[one["number"] - before for one in found]] = True
    at = 0
    for first, last, many in runs_of(there):
        yield before + first, before + last, found[at : at + many]
        at += many


def _too_many(kind: FindingKind, row: dict[str, Any]) -> int:
    return int(row["message_id_count"] - 1 if kind is FindingKind.DUPLICATED else len(row["message_id_distinct"]))

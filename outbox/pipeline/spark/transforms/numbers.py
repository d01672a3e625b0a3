"""
Numbers as bitmaps: one bit per message, 32,768 numbers per bucket.

Rows are reduced to bitmaps before the shuffle, so a stage of ten million rows sends a few hundred of them. A cell is the bitmap
of one lane, role and bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from outbox.pipeline.spark.transforms.columns import Bools, Ints, coded, distinct, integers

BUCKET = 32_768
HIGHEST = BUCKET << 34  # so that lane, role and bucket fit into one integer
CELLS_AT_ONCE = 256  # limits memory: each needs a byte per number for a moment

LANE = ("source", "topic", "lane")
LaneName = tuple[str | None, str | None, int | None]

CELL = pa.schema(
    {
        "source": pa.string(),
        "topic": pa.string(),
        "lane": pa.int16(),
        "role": pa.int32(),
        "bucket": pa.int64(),
        "bits": pa.binary(),
        "repeated": pa.binary(),
        "n": pa.int64(),
        "lowest": pa.int64(),
        "highest": pa.int64(),
        "future": pa.int64(),
    }
)

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


@dataclass(frozen=True)
class Cell:
    """
    The numbers of one lane in one role and bucket.

    Args:
        bits: which numbers are present; a bit or a byte for each.
        repeated: which of them are present more than once.
        n: the number of rows.
        future: the number of rows with a time in the future.
    """

    bits: Any
    repeated: Any
    n: int
    lowest: int
    highest: int
    future: int = 0

    def __or__(self, other: Cell) -> Cell:
        """Return the union of two cells."""
        return Cell(
            self.bits | other.bits,
            self.repeated | other.repeated | (self.bits & other.bits),
            self.n + other.n,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
            self.future + other.future,
        )


class Cells:
    """
    Accumulates the cells of a part of a frame.

    Args:
        no_number: the role of rows with an impossible number.
    """

    def __init__(self, no_number: int) -> None:
        self._no_number = no_number
        self._found: dict[tuple[LaneName, int, int], Cell] = {}

    def add(self, lanes: Ints, names: list[LaneName], roles: Ints, numbers: Ints, future: Bools) -> None:
        """
        Add rows.

        Args:
            lanes: index into `names`, for each row.
        """
        is_number = (numbers >= 1) & (numbers <= HIGHEST)
        all_are = bool(is_number.all())
        index = numbers - 1
        if not all_are:
            index, roles = np.where(is_number, index, 0), np.where(is_number, roles, self._no_number)
        keys, cells = _cells_of(lanes, roles, index >> 15)
        rows = np.bincount(cells, minlength=len(keys))
        futures = np.bincount(cells[future], minlength=len(keys))
        for first in range(0, len(keys), CELLS_AT_ONCE):
            inside = slice(None) if len(keys) <= CELLS_AT_ONCE else (cells >= first) & (cells < first + CELLS_AT_ONCE)
            many = min(CELLS_AT_ONCE, len(keys) - first)
            flags, repeated = _flags(cells[inside] - first, index[inside] & (BUCKET - 1), rows[first : first + many])
            for n in range(many):
                lane, role, bucket = keys[first + n]
                lowest, highest = _ends(flags[n], bucket)
                if not all_are:
                    own = numbers[cells == first + n]
                    lowest, highest = int(own.min()), int(own.max())
                cell = Cell(
                    _packed(flags[n]), _packed(repeated[n]), int(rows[first + n]), lowest, highest, int(futures[first + n])
                )
                where = names[lane], role, bucket
                self._found[where] = self._found[where] | cell if where in self._found else cell

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield a batch with a row for each cell."""
        rows = [
            {
                **dict(zip(LANE, name, strict=True)),
                "role": role,
                "bucket": bucket,
                "bits": cell.bits.tobytes(),
                "repeated": _of(cell.repeated),
                "n": cell.n,
                "lowest": cell.lowest,
                "highest": cell.highest,
                "future": cell.future,
            }
            for (name, role, bucket), cell in self._found.items()
        ]
        yield pa.RecordBatch.from_pylist(rows, CELL)


def lanes_of(batch: pa.RecordBatch) -> tuple[Ints, list[LaneName]]:
    """Return the lane of each row as an index into the returned list of lanes."""
    source, topic = coded(batch, "source"), coded(batch, "topic")
    lane, has_lane = integers(batch, "lane")
    numbered = lane + (1 << 15) if has_lane.all() else np.where(has_lane, lane + (1 << 15), 1 << 16)
    low = int(numbered.min(initial=1 << 16))
    span = int(numbered.max(initial=low)) - low + 1
    pair = source.codes.astype(np.int64) * len(topic.values) + topic.codes
    keys, lanes = distinct(pair * span + (numbered - low))
    names: list[LaneName] = []
    for code in keys.tolist():
        (of_source, of_topic), number = divmod(code // span, len(topic.values)), code % span + low
        names.append((source.values[of_source], topic.values[of_topic], None if number == 1 << 16 else number - (1 << 15)))
    return lanes, names


def _cells_of(lanes: Ints, roles: Ints, buckets: Ints) -> tuple[list[tuple[int, int, int]], Ints]:
    """Return the distinct cells, and the index of each row's cell among them."""
    if not len(lanes):
        return [], lanes
    low, many_roles = int(buckets.min()), int(roles.max()) + 1
    span = int(buckets.max()) - low + 1
    keys, cells = distinct((lanes * many_roles + roles) * span + (buckets - low))
    return [(*divmod(key // span, many_roles), key % span + low) for key in keys.tolist()], cells


def unpack(bits: bytes | Bytes) -> Bools:
    return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)


def _packed(flags: Bools) -> Bytes:
    return np.packbits(flags, bitorder="little")


def _of(bits: Bytes) -> bytes | None:
    return bits.tobytes() if bits.any() else None


def _ends(flags: Bools, bucket: int) -> tuple[int, int]:
    before = bucket * BUCKET + 1
    return before + int(flags.argmax()), before + BUCKET - 1 - int(flags[::-1].argmax())


def _flags(cells: Ints, positions: Ints, rows: Ints) -> tuple[Bools, Bools]:
    """Return for each cell which positions are present, and which are repeated."""
    spots = cells * BUCKET + positions
    flags: Bools = np.zeros((len(rows), BUCKET), bool)
    flags.reshape(-1)[spots] = True
    repeated = np.zeros_like(flags)
    has_repeats = rows > np.count_nonzero(flags, axis=1)
    if has_repeats.any():
        dirty = has_repeats[cells]
        spot_numbers, n = np.unique(spots[dirty], return_counts=True)
        repeated.reshape(-1)[spot_numbers[n > 1]] = True
    return flags, repeated

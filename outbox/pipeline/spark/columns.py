"""
Columns of an Arrow batch as NumPy arrays, and counts of equal rows. Strings with few distinct values are dictionary-encoded.

    topic: ["orders", "orders", "bills"]  ->  Coded(codes=[0, 0, 1], values=["orders", "bills", None])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints: TypeAlias = "npt.NDArray[np.int64]"
Bools: TypeAlias = "npt.NDArray[np.bool_]"

# A uuid7 as text: its first 12 digits are milliseconds.
UUID_LENGTH = 36
TIME_DIGITS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12)
VERSION_DIGIT = 14
HEXADECIMAL: Ints = np.full(256, -1, np.int64)
HEXADECIMAL[np.frombuffer(b"0123456789abcdef", np.uint8)] = range(16)


FEW_CODES = 1 << 16  # a lookup table of this size is faster than a hash table, and fits a core's cache


@dataclass(frozen=True)
class Coded:
    """A dictionary-encoded column of strings: a row's value is values[codes[row]]. The last value is None, for NULL."""

    codes: npt.NDArray[np.int32]
    values: list[str | None]

    def each(self, function: Callable[[Any], Any], kind: Any = np.int64) -> npt.NDArray[Any]:
        """Return the results of a function for each row; it is called once per distinct value."""
        return np.array([function(value) for value in self.values], kind)[self.codes]

    def is_(self, *wanted: str) -> Bools:
        """Return for each row whether it has one of these values."""
        return self.each(wanted.__contains__, np.bool_)

    def of(self, rows: Bools) -> Coded:
        """Return the column of some rows only."""
        return Coded(self.codes[rows], self.values)


def coded(batch: pa.RecordBatch, name: str) -> Coded:
    column = batch.column(name)
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    values = [*column.dictionary.to_pylist(), None]
    return Coded(_filled(column.indices, len(values) - 1), values)


def constant(value: str, rows: int) -> Coded:
    """Return a column with the same value in each row."""
    return Coded(np.zeros(rows, np.int32), [value, None])


def integers(batch: pa.RecordBatch, name: str) -> tuple[Ints, Bools]:
    """Return the numbers, 0 for NULL, and which rows have one."""
    column = batch.column(name)
    return _filled(column.cast(pa.int64()), 0), _is_there(column)


def times_of(batch: pa.RecordBatch, name: str) -> tuple[Ints, Bools]:
    """Return microseconds since 1970, 0 for NULL, and which rows have one."""
    times = batch.column(name).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return _filled(times, 0), _is_there(times)


def micros_of(batch: pa.RecordBatch, *names: str, missing: int = 0) -> Ints:
    """Return microseconds since 1970 of the first of these columns that is not NULL, else `missing`."""
    values: Ints = np.full(batch.num_rows, missing, np.int64)
    for name in reversed(names):
        times, has_one = times_of(batch, name)
        values = times if has_one.all() else np.where(has_one, times, values)
    return values


def _filled(column: pa.Array, value: int) -> Any:
    return (column.fill_null(value) if column.null_count else column).to_numpy(zero_copy_only=False)


def _is_there(column: pa.Array) -> Bools:
    return column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else np.ones(len(column), bool)


def distinct(codes: Ints) -> tuple[Ints, Ints]:
    """Return the distinct integers, and the index of each row's integer among them."""
    if not len(codes):
        return codes, codes
    low = int(codes.min())
    span = int(codes.max()) - low + 1
    if span > FEW_CODES:
        encoded = pa.array(codes).dictionary_encode()
        return encoded.dictionary.to_numpy(), encoded.indices.to_numpy().astype(np.int64)
    moved = codes - low
    found = np.flatnonzero(np.bincount(moved))
    places: Ints = np.zeros(span, np.int64)
    places[found] = np.arange(len(found))
    return found + low, places[moved]


def published_micros(batch: pa.RecordBatch) -> tuple[Ints, Bools]:
    """Return the times in message ids, in microseconds since 1970, 0 for others; and which ids are uuid7."""
    ids = batch.column("message_id").cast(pa.string())
    is_uuid = pc.equal(pc.binary_length(ids), UUID_LENGTH).fill_null(False).to_numpy(zero_copy_only=False)
    if not is_uuid.all():
        ids = ids.take(np.flatnonzero(is_uuid))
    offsets, letters = (np.frombuffer(ids.buffers()[part] or b"", kind) for part, kind in ((1, np.int32), (2, np.uint8)))
    start = offsets[ids.offset] if len(ids) else 0
    rows = letters[start : start + UUID_LENGTH * len(ids)].reshape(-1, UUID_LENGTH)
    millis: Ints = np.zeros(len(ids), np.int64)
    signs: Ints = np.zeros(len(ids), np.int64)
    for place in TIME_DIGITS:
        digit = HEXADECIMAL[rows[:, place]]
        millis = (millis << 4) + digit
        signs |= digit
    is_seven = (rows[:, VERSION_DIGIT] == ord("7")) & (signs >= 0)
    micros: Ints = np.zeros(len(batch), np.int64)
    has_one: Bools = np.zeros(len(batch), bool)
    micros[is_uuid], has_one[is_uuid] = np.where(is_seven, millis * 1000, 0), is_seven
    return micros, has_one


class RowCounter:
    """
    Counts rows by texts and numbers.

    Args:
        schema: columns for the texts, then for the numbers, then the count.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._found: Counter[tuple[object, ...]] = Counter()

    def add(self, texts: Sequence[Coded], numbers: Sequence[Ints]) -> None:
        """Count the rows of a batch. Raises ValueError if the numbers are too far apart to pack a key into one integer."""
        if not len(numbers[0]):
            return
        lowest = [int(number.min()) for number in numbers]
        spans = [int(number.max()) - low + 1 for number, low in zip(numbers, lowest, strict=True)]
        shape = [*(len(text.values) for text in texts), *spans]
        moved = [number - low for number, low in zip(numbers, lowest, strict=True)]
        rows = np.ravel_multi_index([*(text.codes for text in texts), *moved], shape)
        keys, many = np.unique(rows, return_counts=True)
        places: list[list[int]] = [np.asarray(place).tolist() for place in np.unravel_index(keys, shape)]
        names = [[text.values[place] for place in of] for text, of in zip(texts, places[: len(texts)], strict=True)]
        counted = [[place + low for place in of] for of, low in zip(places[len(texts) :], lowest, strict=True)]
        for key, n in zip(zip(*names, *counted, strict=True), many.tolist(), strict=True):
            self._found[key] += n

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the counts as one batch."""
        if self._found:
            columns = zip(*((*key, n) for key, n in self._found.items()), strict=True)
            arrays = [pa.array(column, kind) for column, kind in zip(columns, self._schema.types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

"""Columns of an Arrow batch as NumPy takes them. Strings that repeat come as codes: whatever is asked of one is asked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints: TypeAlias = "npt.NDArray[np.int64]"
Bools: TypeAlias = "npt.NDArray[np.bool_]"


@dataclass(frozen=True)
class Coded:
    """A column of strings: a row's value is values[codes[row]]; the last value is None, which stands for NULL."""

    codes: npt.NDArray[np.int32]
    values: list[str | None]

    def each(self, tell: Callable[[Any], Any], kind: Any = np.int64) -> npt.NDArray[Any]:
        """Give what `tell` says of each row's value."""
        return np.array([tell(value) for value in self.values], kind)[self.codes]

    def is_(self, *wanted: str) -> Bools:
        """Say of each row whether it has one of these values."""
        return self.each(wanted.__contains__, np.bool_)


def coded(batch: pa.RecordBatch, name: str) -> Coded:
    column = batch.column(name)
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    values = [*column.dictionary.to_pylist(), None]
    return Coded(column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False), values)


def integers(batch: pa.RecordBatch, name: str) -> tuple[Ints, Bools]:
    """Give the numbers, 0 for NULL, and which rows have one."""
    column = batch.column(name)
    has_one = np.ones(len(column), bool) if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
    return column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), has_one


def micros_of(batch: pa.RecordBatch, *names: str, missing: int = 0) -> Ints:
    """Give microseconds since 1970 of the first of these columns that is not NULL, else `missing`."""
    found = np.full(batch.num_rows, missing, np.int64)
    for name in reversed(names):
        times = batch.column(name).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        found = np.where(
            times.is_valid().to_numpy(zero_copy_only=False), times.fill_null(0).to_numpy(zero_copy_only=False), found
        )
    return found

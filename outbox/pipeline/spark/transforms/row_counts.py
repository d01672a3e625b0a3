"""Count rows by groups within each part, so that Spark only has to add the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from outbox.pipeline.spark.transforms.columns import Coded, Ints


class RowCounts:
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

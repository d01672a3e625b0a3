"""Counts of rows, held to plain counting. No session is needed."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark.scan import RowCounter, coded

SCHEMA = pa.schema({"name": pa.string(), "place": pa.string(), "number": pa.int64(), "n": pa.int64()})
TEXT = st.none() | st.sampled_from(["", "a", "b"])
NEAR, FAR = st.integers(-3, 3), st.integers(-(1 << 40), 1 << 40)


def batches_of(numbers):
    return st.lists(st.lists(st.tuples(TEXT, TEXT, numbers), max_size=20), max_size=4)


def add(found, rows):
    batch = pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=False)) for row in rows], SCHEMA)
    found.add([coded(batch, "name"), coded(batch, "place")], [batch.column("number").to_numpy()])


class TestRowCounter:
    @settings(deadline=None)
    @given(batches_of(NEAR) | batches_of(FAR))
    def test_counts_what_has_all_in_common(self, batches):
        found = RowCounter(SCHEMA)
        for rows in batches:
            add(found, rows)

        counted = {tuple(row.values())[:-1]: row["n"] for batch in found.batches() for row in batch.to_pylist()}

        assert counted == Counter(row for rows in batches for row in rows)

    def test_refuses_numbers_that_no_key_can_name(self):
        with pytest.raises(ValueError, match="dim"):
            add(RowCounter(SCHEMA), [("a", "b", np.iinfo(np.int64).min), ("a", "b", np.iinfo(np.int64).max)])

"""Columns as NumPy takes them, held to plain Python. No session is needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark.scan import FEW_CODES, distinct

CODES = st.lists(st.sampled_from([-(1 << 60), -5, 0, 1, 2, 3, FEW_CODES, 1 << 60]), max_size=20)
NEAR = st.lists(st.integers(-9, 9), max_size=20)


class TestDistinct:
    @settings(deadline=None)
    @given(st.one_of(CODES, NEAR))
    def test_gives_each_integer_once_and_says_where_it_stands(self, codes):
        keys, rows = distinct(np.array(codes, np.int64))

        assert sorted(keys.tolist()) == sorted(set(codes))
        assert keys[rows].tolist() == codes

    @pytest.mark.parametrize("last", [FEW_CODES - 1, FEW_CODES, FEW_CODES + 1])
    def test_knows_those_at_the_end_of_its_table(self, last):
        keys, rows = distinct(np.array([last, 0, last], np.int64))

        assert keys[rows].tolist() == [last, 0, last]

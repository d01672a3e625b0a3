"""Rows found by lane and number, and what of them repeats. No session is needed."""

from collections import defaultdict

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark.cells import BUCKET, HIGHEST, MAX_RUNS
from outbox.pipeline.spark.lanes import index_of, repeats

LANES = [("a", "orders", 0), ("a", "orders", 1), ("b", "orders", 0)]
SPANS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 50), st.integers(0, 9)), max_size=8)


def table(*rows):
    return pa.Table.from_pylist([dict(zip(("consumer_group", "number", "message_id"), row, strict=True)) for row in rows])


class TestWanted:
    @settings(deadline=None)
    @given(SPANS)
    def test_finds_the_numbers_of_its_ranges_in_their_lanes(self, spans):
        wanted = defaultdict(list)
        for lane, first, more in spans:
            wanted[LANES[lane]].append((first, first + more))
        numbers = np.arange(-2, 70)

        for lane in range(len(LANES)):
            found = index_of(wanted).has(np.full(len(numbers), lane), LANES, numbers)
            assert set(numbers[found]) == {n for at, first, more in spans if at == lane for n in range(first, first + more + 1)}

    def test_takes_the_highest_number_and_none_that_is_no_number(self):
        wanted = index_of({LANES[0]: [(HIGHEST, HIGHEST)], LANES[1]: [(1, 1)]})
        lanes, numbers = zip((0, HIGHEST), (0, HIGHEST + 1), (1, HIGHEST), (1, 1), (1, 0), (2, 1), (2, 2**63 - 1), strict=True)

        found = wanted.has(np.array(lanes), LANES, np.array(numbers))

        assert found.tolist() == [True, False, False, True, False, False, False]


class TestRepeats:
    def test_are_told_apart_by_group_and_by_message(self):
        rows = table(("cart", 4, "x"), ("cart", 4, "x"), ("cart", 5, "y"), ("cart", 5, "y"), ("cart", 5, "y"), ("points", 4, "x"))
        others = table(("points", 9, "p"), ("points", 9, "q"), ("cart", 7, "z"))

        found = [tuple(one.values()) for one in repeats(pa.concat_tables([rows, others]), ids=10)]

        assert found == [("cart", "duplicated", 4, 5, 2, 3, ["x", "y"]), ("points", "renumbered", 9, 9, 1, 2, ["p", "q"])]

    def test_name_as_many_ids_as_were_asked_for_of_the_first_ones(self):
        rows = table(*(("", number, f"m{number}") for number in range(1, 9) for _ in range(2)))

        (found,) = repeats(rows, ids=3)

        assert (found["first"], found["last"], found["n"], found["ids"]) == (1, 8, 8, ["m1", "m2", "m3"])

    def test_that_are_scattered_are_said_as_one(self):
        numbers = [BUCKET + 1 + 2 * n for n in range(MAX_RUNS + 1)]
        rows = table(*(("", number, "m") for number in numbers for _ in range(2)))

        (found,) = repeats(rows, ids=2)

        assert (found["first"], found["last"], found["numbers"]) == (numbers[0], numbers[-1], len(numbers))

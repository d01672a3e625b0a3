"""The hash of a row. No session is needed."""

import pyarrow as pa
import pytest

from outbox.pipeline.spark.history import FRAMES
from outbox.pipeline.spark.keys import DIGESTED, TEXTS, row_hashes


def batch_of(frame, *rows):
    """Make rows in which a text is its column's name and a number its place, but for what is given."""
    names = DIGESTED[frame]
    usual = {name: name if name in TEXTS else place for place, name in enumerate(names)}
    schema = pa.schema({name: pa.string() if name in TEXTS else pa.int64() for name in names})
    return pa.RecordBatch.from_pylist([{**usual, **row} for row in rows], schema)


class TestTheHashOfARow:
    @pytest.mark.parametrize("frame", FRAMES)
    def test_is_another_where_any_column_is(self, frame):
        others = [
            {name: other}
            for name in DIGESTED[frame]
            for other in ((None, "", "another") if name in TEXTS else (None, 0, 1 << 40, -1))
            if other != batch_of(frame, {}).to_pylist()[0][name]
        ]

        found = row_hashes(frame, batch_of(frame, {}, *others))

        assert len(set(found.tolist())) == 1 + len(others)

    def test_is_another_where_two_columns_change_places(self):
        one, other = {"key": "a", "type": "b"}, {"key": "b", "type": "a"}

        assert len(set(row_hashes("messages", batch_of("messages", one, other)).tolist())) == 2

    def test_is_of_the_row_alone(self):
        rows = [{"about": f"shop.order:{n}"} for n in range(5)]

        assert row_hashes("business", batch_of("business", *rows)).tolist() == [
            row_hashes("business", batch_of("business", row))[0] for row in rows
        ]

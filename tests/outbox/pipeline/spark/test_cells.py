"""Numbers as bitmaps, and roles of rows, held to plain counting. No session is needed."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark import cells as numbers
from outbox.pipeline.spark.audit import observed
from outbox.pipeline.spark.cells import BUCKET, HIGHEST, NONE, Cells, InGroup, Reach, Roles, Seen, lanes_of, micros, of_group
from outbox.pipeline.spark.config import AuditedGroup
from outbox.pipeline.spark.lanes import roles_in

NAMES = [("a", "orders", 0), ("a", "orders", 1)]
ROWS = st.tuples(st.integers(0, 1), st.integers(0, 3), st.sampled_from([1, 2, 3, BUCKET, BUCKET + 1, 5 * BUCKET, HIGHEST]))


def add(cells, rows):
    lanes, roles, wanted = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    cells.add(lanes, NAMES, roles, wanted, np.zeros(len(rows), bool))


def read(cells):
    """Return (lane, role) -> number -> True if it is there more than once."""
    found = {}
    for batch in cells.batches():
        for row in batch.to_pylist():
            (role,) = roles_in([row]).values()
            for place in np.flatnonzero(role.bits):
                name = NAMES.index((row["source"], row["topic"], row["lane"])), row["role"]
                found.setdefault(name, {})[row["bucket"] * BUCKET + int(place) + 1] = bool(role.repeated[place])
    return found


class TestCells:
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(batches=st.lists(st.lists(ROWS, min_size=1, max_size=20), min_size=1, max_size=4))
    @pytest.mark.parametrize("at_once", [1, 256])
    def test_say_which_numbers_are_there_and_which_more_than_once(self, monkeypatch, batches, at_once):
        monkeypatch.setattr(numbers, "CELLS_AT_ONCE", at_once)
        cells = Cells(8)
        for rows in batches:
            add(cells, rows)

        counted = Counter(row for rows in batches for row in rows)
        expected = {}
        for (lane, role, number), n in counted.items():
            expected.setdefault((lane, role), {})[number] = n > 1

        assert read(cells) == expected

    def test_count_rows_and_say_how_far_they_go(self):
        cells = Cells(8)
        cells.add(np.zeros(4, int), NAMES, np.full(4, 9), np.array([5, 7, 7, 6]), np.array([0, 1, 1, 0], bool))
        cells.add(np.zeros(1, int), NAMES, np.full(1, 9), np.array([3]), np.array([1], bool))

        ((row,),) = (batch.to_pylist() for batch in cells.batches())

        assert {name: row[name] for name in ("n", "lowest", "highest", "future", "role", "bucket", "lane")} == {
            "n": 5,
            "lowest": 3,
            "highest": 7,
            "future": 3,
            "role": 9,
            "bucket": 0,
            "lane": 0,
        }

    def test_name_the_ends_of_numbers_that_no_lane_gives_out(self):
        cells = Cells(8)
        add(cells, [(0, 3, -7), (0, 0, 0), (0, 0, 2**62), (0, 0, 4)])

        found = {row["role"]: (row["lowest"], row["highest"], row["n"]) for batch in cells.batches() for row in batch.to_pylist()}

        assert found == {8: (-7, 2**62, 3), 0: (4, 4, 1)}


class TestLanes:
    def test_are_told_apart_by_source_topic_and_lane_null_or_not(self):
        rows = [("a", "x", 0), ("a", "x", 1), ("b", "x", 0), (None, "x", 0), ("a", None, 0), ("a", "x", None), ("a", "x", -1)]
        columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), KINDS, strict=True)]

        lanes, names = lanes_of(pa.RecordBatch.from_arrays(columns, ["source", "topic", "lane"]))

        assert [names[lane] for lane in lanes] == rows


KINDS = pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.int16()


NOW = datetime(2026, 3, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
GROUPS = [AuditedGroup("cart", ["orders"])]
WAITING = of_group(0, InGroup.WAITING)


def failed_deliveries(*rows):
    named = [{"source": "s", "topic": "orders", "number": None, "consumer_group": "cart", "outcome": a, "at": b} for a, b in rows]
    schema = pa.schema([(name, pa.string()) for name in ("source", "topic", "consumer_group", "outcome", "message_id")])
    return pa.RecordBatch.from_pylist(named, schema.append(pa.field("number", pa.int64())).append(AT))


def sent(at):
    row = {"topic": "bills", "claimed_at": at, "at": at}
    return pa.RecordBatch.from_pylist([row], pa.schema([("topic", pa.string()), ("claimed_at", AT.type), AT]))


AT = pa.field("at", pa.timestamp("us", "UTC"))


class TestAMessageThatAGroupHasNotHandled:
    ROWS = tuple((outcome, NOW) for outcome in ("waiting", "deferred", "dead", "discarded", "retry", "dead letter", "duplicate"))

    def test_waits_is_dead_or_was_discarded_whatever_the_log_says(self):
        (found,) = Roles(GROUPS, micros(NOW)).of("failed_deliveries", failed_deliveries(*self.ROWS))

        dead, discarded = of_group(0, InGroup.DEAD_LETTER), of_group(0, InGroup.DISCARDED)
        assert found.tolist() == [WAITING, WAITING, dead, discarded, NONE, NONE, NONE]

    def test_without_a_number_too(self):
        roles = Roles(GROUPS, micros(NOW))

        (found,) = observed(roles, micros(NOW), "failed_deliveries", failed_deliveries(*self.ROWS))

        assert found == ["waits in cart", "waits in cart", "dead in cart", "dead in cart", None, None, None]


class TestAMessageOfATopicOfTypeDelay:
    @pytest.mark.parametrize(
        ("sent_at", "role"),
        [
            (NOW - 9 * HOUR, Seen.UNSEEN),  # shown before the recorder began
            (NOW - 5 * HOUR, Seen.SENT_YOUNG),  # sent before it began, and hidden still, perhaps
            (NOW - 3 * HOUR, Seen.SENT_YOUNG),
            (NOW - HOUR / 2, Seen.UNREAD),
        ],
    )
    def test_may_be_hidden_when_the_recorder_begins(self, sent_at, role):
        reach = Reach(micros(NOW - 4 * HOUR), micros(NOW - HOUR), hidden=6 * 3600 * 10**6)

        assert Roles([], micros(NOW), {"bills": reach}).of_sent(sent(sent_at)).tolist() == [role]

    def test_is_not_hidden_in_a_topic_of_another_type(self):
        reach = Reach(micros(NOW - 4 * HOUR), micros(NOW - 6 * HOUR), hidden=0)

        assert Roles([], micros(NOW), {"bills": reach}).of_sent(sent(NOW - 5 * HOUR)).tolist() == [Seen.UNSEEN]

"""The verdict over a bucket, held to plain Python sets, and rows found by lane and number. No session is needed."""

from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark.cells import BUCKET, HIGHEST, MAX_RUNS, Cell, GroupRole, Role, group_role
from outbox.pipeline.spark.lanes import ExpectedLane, compare_stages, index_of, repeats

FIRST, LAST = 3, 60
NUMBERS = st.lists(st.integers(1, 70), max_size=40)
STAGES = {
    "sent": Role.SENT,
    "unseen": Role.UNSEEN,
    "open": Role.OPEN_LATE,
    "gone": Role.GONE,
    "stored": Role.STORED,
    "young": Role.STORED_YOUNG,
    "handled": group_role(0, GroupRole.HANDLED),
    "dead": group_role(0, GroupRole.DEAD_LETTER),
    "discarded": group_role(0, GroupRole.DISCARDED),
    "waiting": group_role(0, GroupRole.WAITING),
}
LANE = ExpectedLane(FIRST, LAST, is_broker_known=True, groups={0: "cart"})


def role(rows, bucket=0):
    n = np.bincount([number - 1 - bucket * BUCKET for number in rows], minlength=BUCKET)
    return Cell(n > 0, n > 1, len(rows), min(rows), max(rows))


def judged(seen, lane=LANE, bucket=0):
    """Return the numbers of each finding: (kind, stage) -> set."""
    found = {}
    for one in compare_stages(lane, bucket, {STAGES[name]: role(rows, bucket) for name, rows in seen.items() if rows}):
        if one.kind not in (None, "duplicated"):
            found.setdefault((str(one.kind), str(one.stage)), set()).update(range(one.first, one.last + 1))
    return found


def by_sets(seen):
    """The same rules, in plain Python."""
    sets = {name: {number for number in seen.get(name, []) if number >= FIRST} for name in STAGES}
    placed = sets["sent"] | sets["unseen"] | sets["open"] | sets["gone"]
    stored = sets["stored"] | sets["young"]
    handled = sets["handled"]
    due = sets["stored"] | (sets["unseen"] - sets["young"])  # young: hidden at the broker, perhaps
    due -= handled | sets["dead"] | sets["discarded"]
    found = {
        ("lost", "outbox"): set(range(FIRST, LAST + 1)) - placed - stored - handled,
        ("lost", "broker"): sets["sent"] - stored,
        ("lost", "inbox"): due - sets["waiting"],
        ("late", "outbox"): sets["open"],
        ("late", "inbox"): due & sets["waiting"],
        ("orphan", "broker"): stored - placed,
        ("orphan", "inbox"): handled - stored - placed,
        ("beyond the last number", "outbox"): {number for number in placed | stored | handled if number > LAST},
    }
    return {what: numbers for what, numbers in found.items() if numbers}


class TestTheCounts:
    def test_of_a_group_tell_discarded_dead_and_unread_apart(self):
        seen = {
            "sent": range(3, 11),
            "stored": range(3, 11),
            "handled": [3, 4, 6, 7],  # discarded messages have inbox rows, too
            "dead": [4, 5],
            "discarded": [6, 7],
            "waiting": [4, 7, 8, 9],
        }
        roles = {STAGES[name]: role(rows) for name, rows in seen.items()}

        counts = {one.label: one.n for one in compare_stages(LANE, 0, roles) if one.kind is None}

        assert {what: count for what, count in counts.items() if what.endswith(" cart")} == {
            "handled by cart": 2,
            "dead letters of cart": 1,
            "discarded by operators for cart": 2,
            "unread by cart": 2,
        }


class TestTheVerdict:
    @settings(deadline=None)
    @given(st.fixed_dictionaries(dict.fromkeys(STAGES, NUMBERS)))
    def test_is_that_of_plain_sets(self, seen):
        assert judged(seen) == by_sets(seen)

    @settings(deadline=None)
    @given(NUMBERS.filter(bool))
    def test_names_each_number_that_repeats_in_a_role_or_in_several(self, rows):
        half = len(rows) // 2
        roles = {Role.STORED: rows[:half], Role.STORED_YOUNG: rows[half:]}
        found = compare_stages(LANE, 0, {which: role(some) for which, some in roles.items() if some})

        repeats = {number for one in found if one.kind == "duplicated" for number in range(one.first, one.last + 1)}

        assert repeats == {number for number, n in Counter(rows).items() if n > 1 and number >= FIRST}

    def test_holds_at_the_edges_of_a_bucket(self):
        edge = 3 * BUCKET
        lane = ExpectedLane(1, edge, is_broker_known=True)
        whole = list(range(2 * BUCKET + 1, edge + 1))

        assert judged({"sent": whole, "stored": whole}, lane, bucket=2) == {}
        assert judged({"sent": whole, "stored": whole[1:-1]}, lane, bucket=2) == {
            ("lost", "broker"): {2 * BUCKET + 1, edge},
        }

    @pytest.mark.parametrize("number", [BUCKET, BUCKET + 1])
    def test_knows_the_last_number_a_lane_gave_out(self, number):
        found = judged({}, ExpectedLane(1, number, is_broker_known=True), bucket=1)

        assert found == ({("lost", "outbox"): {BUCKET + 1}} if number > BUCKET else {})


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

"""Runs of adjacent positions that leave a batch. The statement is tested with the splitter, in tests/outbox/relay."""

from outbox.batches.batch import SplitReason, Unaccepted
from outbox.batches.split import Run, runs


class TestRuns:
    def test_join_neighbours_that_part_for_the_same_reason(self):
        unsure, refused = Unaccepted(SplitReason.UNSURE, "late"), Unaccepted(SplitReason.REFUSED, "bad")

        found = runs({5: unsure, 1: unsure, 2: unsure, 3: refused, 6: Unaccepted(SplitReason.UNSURE, "other")})

        assert found == [
            Run(1, 2, SplitReason.UNSURE, "late"),
            Run(3, 3, SplitReason.REFUSED, "bad"),
            Run(5, 5, SplitReason.UNSURE, "late"),
            Run(6, 6, SplitReason.UNSURE, "other"),
        ]

    def test_leave_out_a_position_between_two_of_the_same_reason(self):
        unsure = Unaccepted(SplitReason.UNSURE, "late")

        found = runs({1: unsure, 3: unsure})

        assert [(run.lo, run.hi) for run in found] == [(1, 1), (3, 3)]

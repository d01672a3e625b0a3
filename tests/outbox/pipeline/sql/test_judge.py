"""The rules in SQL, against plain sets on many random histories. That Spark says the same: tests/outbox/pipeline/spark."""

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings

from tests.outbox.pipeline.spark.faults import COUNT, GONE, by_sets, lose
from tests.outbox.pipeline.spark.twins import judged_by_sql
from tests.outbox.pipeline.spark.worlds import World, made_anew


def said(answer):
    return [(str(one.kind), str(one.stage), one.group, one.first, one.last, one.count) for one in answer.findings]


@pytest.fixture(autouse=True)
def _tables(django_db_setup):
    pass


class TestSql:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(GONE)
    def test_finds_what_plain_sets_find(self, gone):
        world = lose(World().set(business=[]).add(COUNT), gone)

        found = defaultdict(set)
        for kind, stage, group, first, last, count in said(judged_by_sql(world)):
            assert count == last - first + 1
            found[kind, stage, group].update(range(first, last + 1))

        assert dict(found) == by_sets(gone)

    def test_finds_nothing_in_a_whole_history(self):
        answer = judged_by_sql(World().add(40).add(30, lane=1))

        assert said(answer) == []
        assert [(one.group, one.topic, one.minutes[-1].backlog) for one in answer.backlogs] == [
            ("cart", "orders", 0),
            ("points", "orders", 0),
        ]
        assert sum(n for _, hop, _, _, _, n in answer.histograms if hop == "store") == 70

    def test_holds_no_position_to_those_of_a_broker_that_was_made_anew(self):
        assert said(judged_by_sql(made_anew())) == [("out of order", "broker", "", 7, 7, 1)]

"""Random histories with faults: Spark, SQL and plain Python sets give the same answers. SQL alone: tests/outbox/pipeline/sql."""

from collections import defaultdict
from datetime import timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark.latency import backlog_report, count_times, latency_report
from tests.outbox.pipeline.spark.faults import COUNT, GONE, NUMBERS, by_sets, lose
from tests.outbox.pipeline.spark.together import audit_together
from tests.outbox.pipeline.spark.twins import judged_by_sql
from tests.outbox.pipeline.spark.worlds import OURS, START, World, message_id, said

STATES = ("sent", "dead", "discarded", "released", "claimed", "prepared")
OUTCOMES = ("waiting", "deferred", "dead", "discarded", "retry", "dead letter")

FAULTS = st.fixed_dictionaries(
    {
        "gone": GONE,
        "states": st.dictionaries(st.integers(1, COUNT), st.sampled_from(STATES), max_size=4),
        "young": NUMBERS,
        "twice": NUMBERS,
        "unnumbered": NUMBERS,
        "renumbered": NUMBERS,
        "mark": st.integers(COUNT - 3, COUNT + 3),
        "outcomes": st.dictionaries(st.integers(1, COUNT), st.sampled_from(OUTCOMES), max_size=4),
        "seconds": st.dictionaries(st.integers(1, COUNT), st.floats(0.001, 4000), max_size=6),
        "lane": st.sampled_from((True, False)),
    }
)


def spoil(faults):
    """Make a history of two lanes, and do all of that to it."""
    world = lose(World().add(COUNT).add(7, lane=1), faults["gone"]).mark(faults["mark"])
    for number, state in faults["states"].items():
        world.change("places", {"state": state}, number=number)
    world.change("places", {"at": world.as_of}, number=sorted(faults["young"]))
    for name in ("broker", "inbox"):
        world.frames[name] += [dict(row) for row in world.frames[name] if row["number"] in faults["twice"]]
        renumbered = [row for row in world.frames[name] if row["number"] in faults["renumbered"]]
        world.frames[name] += [{**row, "message_id": message_id("orders", 9, row["number"])} for row in renumbered]
        for number, seconds in faults["seconds"].items():
            world.change(name, {"at": START + timedelta(seconds=seconds)}, number=number)
    for number, outcome in faults["outcomes"].items():
        row = {"consumer_group": "cart", "source": OURS, "topic": "orders", "lane": 0, "number": number, "outcome": outcome}
        tried = {**row, "message_id": message_id("orders", 0, number), "at": START}
        tries = [
            {**tried, "delivery_count": delivery_count} for delivery_count in (1, 2, 2)
        ]  # the last one twice: its group and its broker say so
        world.frames["failed_deliveries"] += tries
    for name in ("places", "broker", "inbox", "failed_deliveries"):
        world.change(name, {"number": None, "lane": None}, number=sorted(faults["unnumbered"]))
    if not faults["lane"]:
        world.frames["marks"] = [mark for mark in world.frames["marks"] if mark["lane"] != 1]
    return world


class TestSpark:
    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(GONE, min_size=8, max_size=8))
    def test_finds_what_plain_sets_find(self, spark, losses):
        reports = audit_together(spark, [lose(World().set(business=[]).add(COUNT), gone) for gone in losses])

        for gone, report in zip(losses, reports, strict=True):
            found = defaultdict(set)
            for kind, stage, group, first, last, _ in said(report):
                found[kind, stage, group].update(range(first, last + 1))
            assert dict(found) == by_sets(gone)

    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(faults=FAULTS)
    def test_finds_and_counts_what_sql_does(self, spark, faults):
        world = spoil(faults)

        world.audit(spark)  # holds its findings to those of SQL

        history, answer = world.history(spark), judged_by_sql(world)
        times = count_times(spark, world.config, history)
        assert sorted(latency_report(world.config, times)["histograms"]) == sorted(answer.histograms)
        by_spark = {(one["group"], one["topic"]): one for one in backlog_report(world.config, history, times)}
        assert set(by_spark) == {(one.group, one.topic) for one in answer.backlogs}
        for one in answer.backlogs:
            spark_says = by_spark[one.group, one.topic]
            said_then = [[at.minute * 60, at.backlog, at.growth, at.cause] for at in one.minutes[: len(spark_says["minutes"])]]
            assert (said_then, one.again) == (spark_says["minutes"], spark_says["most_repeated"])

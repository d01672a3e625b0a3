"""Latency and backlog as the job reports them."""

from datetime import timedelta

from outbox.pipeline.spark.config import AuditedGroup
from outbox.pipeline.spark.latency import backlog_report, count_times, latency_report
from tests.outbox.pipeline.spark.ids import message_id
from tests.outbox.pipeline.spark.worlds import OURS, START, World

SECOND = timedelta(seconds=1)


class TestClocks:
    def test_that_jump_back_are_named_by_hop_and_group(self, spark):
        world = World().add(9)
        world.change("broker", {"at": START - 30 * SECOND}, number=[3, 4])  # stored before it was published
        world.change("places", {"at": START - 30 * SECOND}, number=7)  # sent before it was claimed
        world.change("inbox", {"at": START - 3 * SECOND}, number=5, consumer_group="cart")  # by less than clocks may differ
        world.change("inbox", {"at": START - 7 * SECOND}, number=6, consumer_group="cart")

        report = latency_report(world.config, count_times(spark, world.config, world.history(spark)))

        found = [(one["kind"], one["stage"], one["topic"], one["group"], one["count"]) for one in report["findings"]]
        assert found == [
            ("clock", "inbox", "orders", "cart", 1),
            ("clock", "outbox", "orders", "", 1),
            ("clock", "broker", "orders", "", 2),
        ]
        assert "a clock has jumped" in report["findings"][0]["text"]


class TestABacklog:
    def test_names_its_cause_and_the_messages_tried_most_often(self, spark):
        world = World().set(groups=[AuditedGroup("cart", ["orders"]), AuditedGroup("idle", ["orders"])])
        world.add(40).drop("inbox", consumer_group="idle")
        stuck = [message_id("orders", 0, number) for number in (31, 32, 33)]
        world.drop("inbox", number=[31, 32, 33])
        tried = {"consumer_group": "cart", "source": OURS, "topic": "orders", "lane": 0, "outcome": "retry"}
        world.frames["failed_deliveries"] = [
            {
                **tried,
                "number": 31 + n,
                "message_id": one,
                "delivery_count": delivery_count,
                "at": START + timedelta(seconds=delivery_count),
            }
            for n, one in enumerate(stuck)
            for delivery_count in range(1, 9 - 3 * n)
        ]

        history = world.history(spark)
        cart, idle = backlog_report(world.config, history, count_times(spark, world.config, history), repeated=2)

        assert (cart["group"], cart["topic"], cart["backlog"]) == ("cart", "orders", 3)
        assert cart["cause"] == "repeated retries"
        assert cart["onset"] == START.isoformat()
        assert cart["most_repeated"] == [[stuck[0], 8], [stuck[1], 5]]
        assert (idle["backlog"], idle["cause"], idle["most_repeated"]) == (40, "steady overload", [])

    def test_is_told_of_no_group_that_reads_nothing(self, spark):
        config, history = World().set(groups=[]).config, World().history(spark)

        assert backlog_report(config, history, count_times(spark, config, history)) == []

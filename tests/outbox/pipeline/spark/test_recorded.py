"""The broker's side as the recorder wrote it down: judged as far as the recorder had come, and no further."""

from datetime import datetime, timedelta

from outbox.pipeline.spark.history import RecordedTimes
from tests.outbox.pipeline.spark.together import together
from tests.outbox.pipeline.spark.worlds import START, World, message_id

LONG_BEFORE = START - timedelta(hours=1)


RECORDED = {"orders": 0.0, "delayed": 0.02, "unread": 0.0}


def time_of(number: int) -> datetime:
    """Return the moment at which the message with that number was sent, as the outbox has it; one each 10 ms."""
    return START + timedelta(seconds=(number + 1) / 100)


def world(*topics: str) -> World:
    """Nine messages that went all the way, of each topic."""
    made = World().set(recorded=RECORDED, seen_topics=list(RECORDED), clock_tolerance_seconds=0.01, business=[])
    for topic in topics:
        made.add(9, topic=topic)
    made.recorded = {
        "orders": RecordedTimes(began=time_of(2), until=time_of(8)),  # with the clocks' tolerance: 3 to 7
        "delayed": RecordedTimes(LONG_BEFORE, until=time_of(8)),
        "unread": RecordedTimes(LONG_BEFORE, until=None),
    }
    return made


@together
class TestRecordedTopics:
    def test_are_judged_at_the_broker_as_far_as_the_recorder_had_come(self):
        made = world(*RECORDED)
        made.drop("broker", topic="orders", number=[1, 2, 3, 7, 8, 9]).drop("inbox", number=2, consumer_group="cart")
        made.drop("broker", topic="delayed", number=[5, 6, 7, 8])  # shown 20 ms later than sent, perhaps
        made.drop("broker", topic="unread", number=[4])

        report = yield made

        by_topic = {topic: [one for one in report.findings if one.topic == topic] for topic in RECORDED}
        found = {
            topic: [(str(one.kind), str(one.stage), one.group, one.first, one.last) for one in findings]
            for topic, findings in by_topic.items()
        }
        assert found == {
            "orders": [
                ("late", "broker", "", 8, 9),
                ("lost", "broker", "", 3, 3),
                ("lost", "broker", "", 7, 7),
                ("lost", "inbox", "cart", 2, 2),
            ],
            "delayed": [("late", "broker", "", 8, 8), ("lost", "broker", "", 5, 5)],
            "unread": [("late", "broker", "", 4, 4)],
        }
        assert by_topic["orders"][0].detail.startswith("recorded only up to 2026-03-01T12:00:00+00:00; make sure that")
        assert by_topic["orders"][0].ids == (message_id("orders", 0, 8), message_id("orders", 0, 9))
        assert by_topic["unread"][0].detail == "not recorded yet; make sure that manage.py outbox_record is running"

    def test_are_judged_alike_where_messages_carry_no_number(self):
        made = world("orders")
        for name in ("places", "broker", "inbox"):
            made.change(name, {"number": None, "lane": None})
        made.frames["marks"] = []
        ids = {number: message_id("orders", 0, number) for number in range(1, 10)}
        made.drop("broker", "inbox", message_id=[ids[1], ids[5], ids[9]])
        made.change("broker", {"at": None}, message_id=ids[2]).drop("inbox", message_id=ids[2])  # the broker delays it

        found = {(str(one.kind), str(one.stage), one.group): one.ids for one in (yield made).findings}

        assert found == {
            ("late", "broker", ""): (ids[9],),
            ("lost", "broker", ""): (ids[5],),
            ("lost", "inbox", "cart"): (ids[1],),
            ("lost", "inbox", "points"): (ids[1],),
        }

"""Latencies as histograms, held to plain counting; latency and backlog as the job reports them."""

import math
from collections import Counter
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark import latency
from outbox.pipeline.spark.config import AuditedGroup
from outbox.pipeline.spark.latency import backlog_report, count_times, latency_report
from outbox.pipeline.spark.measures import BACKWARDS, COUNTED, INSTANT
from tests.outbox.pipeline.spark import worlds
from tests.outbox.pipeline.spark.worlds import OURS, START, World

TOLERANCE = 5_000_000
MICROSECOND, HOUR, DAY = timedelta(microseconds=1), timedelta(hours=1), timedelta(days=1)

TIMES = st.none() | st.integers(-20_000_000, 200_000_000).map(lambda micros: START + micros * MICROSECOND)
BORN = ("019cabcd-ef01-7abc", "019cabcd-ef01-4abc", "019Zabcd-ef01-7abc")  # a uuid7, and two that are none
IDS_OF_ALL_KINDS = ["", "no-id", *(f"{start}-8000-000000000000" for start in BORN)]
IDS = st.none() | st.sampled_from(IDS_OF_ALL_KINDS)
INBOX = st.tuples(st.sampled_from(["cart", "points"]), st.sampled_from(["orders", "shipments"]), IDS, TIMES)
PLACES = st.tuples(st.sampled_from(["orders", "shipments"]), st.sampled_from(["sent", "dead"]), IDS, TIMES, TIMES)


def histograms(frame, names, *batches, recent=0, counted=False):
    """Return topic, hop, group, minute, bin -> count; of `COUNTED` rows, or of others."""
    made = [pa.RecordBatch.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema(names)) for rows in batches]
    found = [row for batch in latency.histograms(TOLERANCE, recent, frame, iter(made)) for row in batch.to_pylist()]
    return {tuple(row.values())[:-1]: row["n"] for row in found if (row["bin"] == COUNTED) == counted}


def schema(names):
    return pa.schema({name: pa.timestamp("us", "UTC") if name.endswith("at") else pa.string() for name in names})


def place_of(start, end):
    """Say in which minute and bin a latency counts."""
    micros = (end - start) // MICROSECOND
    minute = int(end.timestamp()) // 60
    if micros < -TOLERANCE:
        return minute, BACKWARDS
    return minute, INSTANT if micros <= 1 else math.floor(math.log2(micros) * 8) + 1


def published(message_id):
    if not message_id or len(message_id) != 36 or message_id[14] != "7" or "Z" in message_id:
        return None
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=UUID(message_id).int >> 80)


class TestLatencies:
    @settings(deadline=None)
    @given(st.lists(st.lists(INBOX, max_size=12), max_size=3))
    def test_of_handling_are_counted_by_group(self, batches):
        rows = [row for batch in batches for row in batch if row[3] and published(row[2])]
        expected = Counter(
            (topic, "handle", group, *place_of(published(message_id), at)) for group, topic, message_id, at in rows
        )

        assert histograms("inbox", ("consumer_group", "topic", "message_id", "at"), *batches) == expected

    @settings(deadline=None)
    @given(st.lists(PLACES, max_size=12))
    def test_of_sending_are_of_what_was_sent(self, rows):
        expected = Counter()
        for topic, state, message_id, claimed, sent in rows:
            if state == "sent" and claimed and (born := published(message_id)):
                expected[topic, "claim", "", *place_of(born, claimed)] += 1
            if state == "sent" and claimed and sent:
                expected[topic, "send", "", *place_of(claimed, sent)] += 1

        assert histograms("places", ("topic", "state", "message_id", "claimed_at", "at"), rows) == expected

    @pytest.mark.parametrize(
        ("micros", "place"), [(-TOLERANCE - 1, BACKWARDS), (-TOLERANCE, INSTANT), (1, INSTANT), (2, 9), (4, 17), (1 << 40, 321)]
    )
    def test_fall_into_bins(self, micros, place):
        message_id = str(UUID(int=(int(START.timestamp() * 1000) << 80) | (7 << 76)))
        row = ("orders", message_id, START + micros * MICROSECOND)

        ((_, hop, _, _, found),) = histograms("broker", ("topic", "message_id", "at"), [row])

        assert (hop, found) == ("store", place)

    def test_that_are_not_recent_are_of_a_whole_day(self):
        message_id, at = f"{BORN[0]}-8000-000000000000", datetime(2026, 3, 1, 12, 0, 1, tzinfo=UTC)
        rows = [("orders", message_id, at - DAY), ("orders", message_id, at - 2 * HOUR - DAY), ("orders", message_id, at)]
        recent = int((at - HOUR).timestamp() * 1_000_000)

        found = histograms("broker", ("topic", "message_id", "at"), rows, recent=recent)

        days = Counter({minute * 60: n for (_, _, _, minute, _), n in found.items()})
        assert days == {datetime(2026, 2, 28, tzinfo=UTC).timestamp(): 2, at.timestamp() - 1: 1}


class TestArrivals:
    def test_are_counted_by_the_minute_whatever_their_ids_say(self):
        rows = [("cart", "orders", message_id, START + n * HOUR) for n in (0, 0, 30) for message_id in IDS_OF_ALL_KINDS]

        found = histograms("inbox", ("consumer_group", "topic", "message_id", "at"), rows, recent=1 << 60, counted=True)

        minute = int(START.timestamp()) // 60
        assert found == {
            ("orders", "handle", "cart", minute, COUNTED): 2 * len(IDS_OF_ALL_KINDS),
            ("orders", "handle", "cart", minute + 30 * 60, COUNTED): len(IDS_OF_ALL_KINDS),
        }


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
        stuck = [worlds.message_id("orders", 0, number) for number in (31, 32, 33)]
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

"""What was archived is judged as if it had never left the database."""

import json
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

import pytest
from django.db import connection

from benchmarks.synthetic.database import write_database
from benchmarks.synthetic.plan import Plan
from outbox import database
from outbox.database import partitions
from outbox.ids import day_of
from outbox.models import Inbox, Lane, MessageRow, OperatorAct, State
from outbox.pipeline.models import RecordedMessage, RecordedTopic
from outbox.pipeline.spark import LakeError
from outbox.pipeline.spark.archived import add_archived, snapshot_lake
from outbox.pipeline.spark.archiver import ArchiveConfig, Archiver
from outbox.pipeline.spark.audit import audit
from outbox.pipeline.spark.config import Archived, AuditedGroup, Business, PipelineConfig, Source
from outbox.pipeline.spark.history import FRAMES, open_history
from outbox.pipeline.spark.lake import Lake
from outbox.pipeline.spark.postgres import copy_history
from outbox.pipeline.spark.readers import SparkWriter
from outbox.pipeline.spark.records import archive_lock
from outbox.pipeline.spark.statements import exported_snapshot
from outbox.testing.factories import DeferredFactory
from tests.database_url import url_of
from tests.factories import BatchFactory, MessageRowFactory, TopicFactory, message_id
from tests.outbox.pipeline.spark.archive.arrow import ArrowWriter
from tests.outbox.pipeline.spark.tcp import reached_by_tcp

pytestmark = pytest.mark.slow

FIRST, SECOND, THIRD = (date(2026, 1, day) for day in (1, 2, 3))
PLAN = Plan(1_600, lost=30, duplicated=8, orphans=8, topics=2, lanes=2, groups=2, burst=5, each_micros=150 * 10**6, seed=3)

# One of the topics lies with another broker, and was recorded.
RECORD = """
INSERT INTO outbox_recorded
    (topic, message_id, source, lane, number, key, tag, queue, pos, delivery_count, stored_at, recorded_at)
SELECT t.name, m.message_id::uuid, m.source, (m.headers::jsonb ->> 'ce-lane')::smallint,
    (m.headers::jsonb ->> 'ce-number')::bigint, m.key, m.tag, m.queue::text, m.pos, 1, m.stored_at, m.stored_at
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id WHERE t.name = 'topic-1'
"""
FORGET = """
DELETE FROM outbox_embedded_message WHERE topic_id = (SELECT id FROM outbox_embedded_topic WHERE name = 'topic-1')
"""

# The broker's offset goes back, when the places' rows have left the table.
SEE_AGAIN = """
INSERT INTO outbox_recorded
    (topic, message_id, source, lane, number, key, tag, queue, pos, delivery_count, stored_at, recorded_at)
SELECT topic, message_id, source, lane, number, key, tag, queue, pos, delivery_count, stored_at, now()
FROM jsonb_populate_recordset(NULL::outbox_recorded, %s)
"""

PRUNE_BATCHES = "DELETE FROM outbox_batch WHERE lane = 0 AND sent_at < '2026-01-03'"
STORE = """
INSERT INTO outbox_embedded_message (topic_id, queue, pos, message_id, source, key, tag, headers, body, stored_at)
SELECT id, 0, %s, %s, %s, '', '', %s, '', %s FROM outbox_embedded_topic WHERE name = %s
"""


def execute(statement, *values):
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


@pytest.fixture
def days(transactional_db):
    with database.connect("default") as own:
        for day in (FIRST, SECOND, THIRD):
            partitions.create_partition(own, day)
    yield
    with database.connect("default") as own:
        for day in partitions.days(own):
            if day <= THIRD:
                own.execute(f"DROP TABLE {partitions.table_of(day)}")


@pytest.fixture
def url(days):
    return url_of(connection.settings_dict)


@pytest.fixture
def lake(tmp_path):
    return Lake(tmp_path / "lake")


@pytest.fixture
def archive(url, lake):
    def archive(before, writer=None):
        config = ArchiveConfig(PipelineConfig(Source(url)), str(lake.root), before, patience_seconds=0.0, rows_per_part=400)
        with archive_lock(url) as own:
            return Archiver(config, own, lake, lambda: writer or ArrowWriter(url)).run()

    return archive


@pytest.fixture
def judge(spark, url, lake, tmp_path, jar):
    """Audit what database and lake have; give findings and counts."""

    def judge(config, *, reader="python", archived=True, live_since=None, born=datetime(2026, 1, 1, tzinfo=UTC)):
        folder = str(tmp_path / "history")
        with reached_by_tcp(url) as by_tcp:
            source = Source(by_tcp, reader=reader if jar else "python", partitions=2)
            brokers = [source] if config.brokers else []
            config = replace(config, outbox=source, brokers=brokers, shuffle_partitions=2)
            if archived:
                config = replace(config, archived=Archived(str(lake.root), born, 7 * 86400.0, live_since))
            copy_history(spark, config, folder)
        history = open_history(spark, folder)
        report = audit(spark, replace(config, since=history.audited_since), history)
        return [one.as_dict() for one in report.findings], report.counts

    return judge


def recorded(config):
    """Move a topic to another broker, whose recorder was killed once, and saw one message twice."""
    execute(RECORD)
    execute(FORGET)
    RecordedTopic.objects.create(topic="topic-1", broker="b", consumer_group="r", read_until=datetime.now(UTC))
    RecordedTopic.objects.update(began_at=datetime(2025, 12, 31, tzinfo=UTC))
    again, twice = RecordedMessage.objects.filter(number__in=[40, 41], lane=0).order_by("number")
    see_again(again, queue="retry", pos=1, delivery_count=2)
    see_again(twice, queue="0", pos=10**6)
    return replace(config, recorded={"topic-1": 0.0}, clock_tolerance_seconds=5.0)


def see_again(row, **other):
    for name, value in {"pk": None, **other}.items():
        setattr(row, name, value)
    row.save(force_insert=True)


def something_else_went_wrong():
    """In the books, too: messages that became dead letters, one that nobody would send, one whose row is gone."""
    stranded = MessageRowFactory(
        id=message_id(datetime(2026, 1, 1, 12, tzinfo=UTC)), topic_id=MessageRow.objects.first().topic_id
    )
    handled = Inbox.objects.filter(topic="topic-0", lane=0, number=50).first()
    same = {name: getattr(handled, name) for name in ("consumer_group", "message_id", "topic", "lane", "number", "source")}
    DeferredFactory(**same, dead=True, deferred_at=handled.handled_at)
    handled.delete()
    discarded = Inbox.objects.filter(topic="topic-0", lane=0, number=70).first()
    same = {name: getattr(discarded, name) for name in ("consumer_group", "message_id", "topic")}
    OperatorAct.objects.create(**same, act="discarded", acted_by="ada", acted_at=discarded.handled_at)
    Inbox.objects.filter(**same).update(delivery_count=0)
    gone = Inbox.objects.filter(topic="topic-0", lane=1, number=60).first().message_id
    MessageRow.objects.filter(id=gone).delete()
    return [str(stranded.id), str(gone)]


class TestAHistoryThatWasArchivedInPart:
    def test_is_judged_as_if_it_never_left_the_database(self, spark, url, archive, judge, lake):
        truth = write_database(spark, PLAN, url)
        config = recorded(PipelineConfig.from_json(truth["config"]))
        ids = something_else_went_wrong()
        whole = judge(config, archived=False)
        assert {one["kind"] for one in whole[0]} == {"lost", "duplicated", "orphan"}
        assert len(whole[0]) >= len(truth["findings"])
        assert sorted(one["ids"] for one in whole[0] if one["lane"] is None) == sorted([one] for one in ids)

        seen = json.dumps(list(RecordedMessage.objects.filter(recorded_at__date=FIRST)[:100].values()), default=str)
        with database.connect("default") as reader, reader.transaction():
            reader.execute(f"SELECT FROM {partitions.table_of(FIRST)}")
            writer = SparkWriter(ArchiveConfig(PipelineConfig(Source(url, reader="python")), str(lake.root), SECOND))
            assert archive(SECOND, writer).kept == {str(FIRST): "open transactions"}
            assert archive(THIRD).kept == {str(FIRST): "open transactions"}
        assert sorted({day_of(one) for one in MessageRow.objects.values_list("id", flat=True)}) == [FIRST, THIRD]
        assert not RecordedMessage.objects.filter(recorded_at__lt=datetime(2026, 1, 3, tzinfo=UTC)).exists()
        execute(PRUNE_BATCHES)
        execute(SEE_AGAIN, seen)

        assert judge(config, reader="jdbc") == whole  # one day is in both, and its books went with the next one


class TestWhatBrokersNoLongerHave:
    """
    Messages of three days, one each two hours, of which the broker has the last. `late` began on the second.
    """

    GROUPS = (AuditedGroup("cart", ["orders"]), AuditedGroup("late", ["orders"]), AuditedGroup("far", ["far"]))
    SOURCE = "urn:uuid:of-a-test"
    ORDERS = """(
        SELECT n AS id, timestamptz '2026-01-01 01:00+00' + (n - 1) * interval '2 hours' AS at
        FROM generate_series(1, 38) n WHERE n NOT IN (3, 8)
    )"""
    LIVE = datetime(2026, 1, 3, tzinfo=UTC)

    @pytest.fixture
    def config(self, days):
        execute("UPDATE outbox_source SET id = %s", self.SOURCE)
        orders = TopicFactory(name="orders")
        execute("INSERT INTO outbox_embedded_topic (id, name, type, queues) VALUES (%s, 'orders', 'normal', 1)", orders.id)
        for number in range(1, 37):
            if number != 3:
                by = [("cart", number not in (1, 5, 18, 30)), ("late", number >= 20 and number not in (22, 31))]
                self.send(orders, number, [group for group, is_handled in by if is_handled])
        far = TopicFactory(name="far")  # of another broker, which nobody records
        for number in range(33, 37):
            self.send(far, number, ["far"] if number == 34 else [])
        Lane.objects.create(topic_id=far.id, lane=1, last_seq=36)
        self.half = self.send(orders, None, ["late"], at=datetime(2026, 1, 2, 23, tzinfo=UTC))
        Lane.objects.create(topic_id=orders.id, lane=1, last_seq=36)
        nowhere, groups = Source("postgresql://"), list(self.GROUPS)
        business = [Business("orders", "orders", "shop.order", "Placed", table=self.ORDERS, at="at")]
        return PipelineConfig(nowhere, brokers=[nowhere], business=business, groups=groups, seen_topics=["orders"])

    def send(self, topic, number, handled_by, *, at=None):
        at = at or datetime(2026, 1, 1, 1, tzinfo=UTC) + timedelta(hours=2 * (number - 1))
        about = f"shop.order:{number}" if number else None
        one = MessageRowFactory(
            id=message_id(at), topic=topic, created_at=at, headers=json.dumps({"ce-type": "Placed"}), about=about
        ).id
        lane = None if number is None else 1
        BatchFactory(message_ids=[one], topic=topic, first_seq=number, lane=lane, state=State.SENT, claimed_at=at, sent_at=at)
        where = {"source": self.SOURCE, "topic": topic.name, "lane": lane, "number": number}
        for group in handled_by:
            later = at + timedelta(seconds=1)
            Inbox.objects.create(consumer_group=group, idempotency_key=one, message_id=one, handled_at=later, **where)
        if at >= self.LIVE:
            execute(STORE, number, str(one), self.SOURCE, json.dumps({"ce-lane": "1", "ce-number": str(number)}), at, topic.name)
        return str(one)

    def test_is_held_to_the_outbox_for_groups_that_were_there(self, spark, config, archive, judge):
        archive(THIRD)

        findings, counts = judge(
            replace(config, since=datetime(2026, 1, 1, 4, tzinfo=UTC)), live_since=self.LIVE, born=datetime.now(UTC)
        )

        assert sorted(
            (one["kind"], one["group"], one["topic"], one["first"], one["last"]) for one in findings if one["lane"]
        ) == [
            ("lost", "", "far", 1, 32),
            ("lost", "", "orders", 3, 3),
            ("lost", "cart", "orders", 5, 5),
            ("lost", "cart", "orders", 18, 18),
            ("lost", "cart", "orders", 30, 30),
            ("lost", "far", "far", 33, 33),
            ("lost", "far", "far", 35, 36),
            ("lost", "late", "orders", 22, 22),
            ("lost", "late", "orders", 31, 31),
        ]
        assert sorted((one["kind"], one["group"], one["ids"], one["about"]) for one in findings if not one["lane"]) == [
            ("lost", "", [], ["shop.order:37", "shop.order:38"]),
            ("lost", "cart", [self.half], []),
            ("orphan", "", [], ["shop.order:8"]),
        ]
        assert counts["orders"]["assigned"] == 34


class TestAFileOfTheLake:
    def test_that_is_damaged_is_no_answer(self, spark, url, archive, lake, days, tmp_path):
        MessageRowFactory(id=message_id(datetime(2026, 1, 1, 12, tzinfo=UTC)))
        archive(SECOND)
        (file,) = (lake.root / file for file in lake.committed()[0].frames["messages"].files)
        file.write_bytes(b"x" * file.stat().st_size)
        spark.createDataFrame([], FRAMES["messages"]).write.parquet(f"{tmp_path}/history/messages")

        with exported_snapshot(url) as (own, _):
            held = snapshot_lake(own, Archived(str(lake.root), datetime.now(UTC), 0.0, None), None)
        with pytest.raises(LakeError, match=f"The lake in {lake.root} cannot be read: .*{file.name}"):
            add_archived(spark, PipelineConfig(Source(url)), f"{tmp_path}/history", held, lambda text: None)

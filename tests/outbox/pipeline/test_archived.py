"""What was archived is judged as if it had never left the database."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime

import pytest
from django.db import connection

from outbox import database, partitions
from outbox.models import FailedDelivery, Inbox, MessageRow, RecordedMessage, RecordedTopic
from outbox.pipeline.archive.book import turn
from outbox.pipeline.archive.config import ArchiveConfig
from outbox.pipeline.archive.run import Archiver
from outbox.pipeline.archive.spark import SparkWriter
from outbox.pipeline.audit.run import audit
from outbox.pipeline.config import Archived, PipelineConfig, Source
from outbox.pipeline.history import open_history
from outbox.pipeline.lake.base import open_lake
from outbox.pipeline.sources.postgres import copy_history
from outbox.pipeline.synthetic.database import write_database
from outbox.pipeline.synthetic.plan import Plan
from tests.database_url import url_of
from tests.factories import MessageRowFactory, message_id
from tests.outbox.pipeline.archive.arrow import ArrowWriter
from tests.outbox.pipeline.tcp import reached_by_tcp

FIRST, SECOND, THIRD = (date(2026, 1, day) for day in (1, 2, 3))
PLAN = Plan(1_600, lost=30, duplicated=8, orphans=8, topics=2, lanes=2, groups=2, burst=5, each_micros=150 * 10**6, seed=3)

# One of the topics lies with another broker, and was recorded.
RECORD = """
INSERT INTO outbox_recorded (topic, message_id, source, lane, number, key, tag, queue, pos, nth, stored_at, recorded_at)
SELECT t.name, m.message_id::uuid, m.source, (m.headers::jsonb ->> 'ce-lane')::smallint,
    (m.headers::jsonb ->> 'ce-number')::bigint, m.key, m.tag, m.queue::text, m.pos, 1, m.stored_at, m.stored_at
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id WHERE t.name = 'topic-1'
"""
FORGET = """
DELETE FROM outbox_embedded_message WHERE topic_id = (SELECT id FROM outbox_embedded_topic WHERE name = 'topic-1')
"""

# The broker's offset goes back, when the places' rows have left the table.
SEE_AGAIN = """
INSERT INTO outbox_recorded (topic, message_id, source, lane, number, key, tag, queue, pos, nth, stored_at, recorded_at)
SELECT topic, message_id, source, lane, number, key, tag, queue, pos, nth, stored_at, now()
FROM jsonb_populate_recordset(NULL::outbox_recorded, %s)
"""

PRUNE_BATCHES = "DELETE FROM outbox_batch WHERE lane = 0 AND sent_at < '2026-01-03'"
PRUNE_BROKER = "DELETE FROM outbox_embedded_message WHERE stored_at < %s"


def execute(statement, *values):
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


@pytest.fixture
def days(transactional_db):
    with database.connect("default") as own:
        for day in (FIRST, SECOND, THIRD):
            partitions.make_day(own, day)
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
    return open_lake(str(tmp_path / "lake"))


@pytest.fixture
def archive(url, lake):
    def archive(before, writer=None):
        config = ArchiveConfig(PipelineConfig(Source(url)), str(lake.root), before, patience_seconds=0.0, rows_per_part=400)
        with turn(url) as own:
            return Archiver(config, own, lake, writer or ArrowWriter(url)).run()

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
        report = audit(spark, replace(config, since=history.judged_since), history)
        return [one.as_dict() for one in report.findings], report.counts

    return judge


def recorded(config):
    """Move a topic to another broker, whose recorder was killed once, and saw one message twice."""
    execute(RECORD)
    execute(FORGET)
    RecordedTopic.objects.create(topic="topic-1", broker="b", consumer_group="r", read_until=datetime.now(UTC))
    RecordedTopic.objects.update(began_at=datetime(2025, 12, 31, tzinfo=UTC))
    again, twice = RecordedMessage.objects.filter(number__in=[40, 41], lane=0).order_by("number")
    see_again(again, queue="retry", pos=1, nth=2)
    see_again(twice, queue="0", pos=10**6)
    return replace(config, recorded={"topic-1": 0.0}, clock_tolerance_seconds=5.0)


def see_again(row, **other):
    for name, value in {"pk": None, **other}.items():
        setattr(row, name, value)
    row.save(force_insert=True)


def something_else_went_wrong():
    """In the books, too: a message that became a dead letter, one that nobody would send, one whose row is gone."""
    stranded = MessageRowFactory(
        id=message_id(datetime(2026, 1, 1, 12, tzinfo=UTC)), topic_id=MessageRow.objects.first().topic_id
    )
    handled = Inbox.objects.filter(topic="topic-0", lane=0, number=50).first()
    same = {name: getattr(handled, name) for name in ("consumer_group", "message_id", "topic", "lane", "number", "source")}
    FailedDelivery.objects.create(**same, nth=3, outcome="dead letter", fingerprint="f", error="e", failed_at=handled.handled_at)
    handled.delete()
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
        with database.connect("default") as reader, reader.transaction():  # one day is in both, its books went with the next
            reader.execute(f"SELECT FROM {partitions.table_of(FIRST)}")
            writer = SparkWriter(ArchiveConfig(PipelineConfig(Source(url, reader="python")), str(lake.root), SECOND))
            assert archive(SECOND, writer).kept == {str(FIRST): "open transactions"}
            assert archive(THIRD).kept == {str(FIRST): "open transactions"}
            assert judge(config, reader="jdbc") == whole

        archive(THIRD)
        execute(PRUNE_BATCHES)
        assert not RecordedMessage.objects.filter(recorded_at__date=FIRST).exists()
        execute(SEE_AGAIN, seen)
        assert not MessageRow.objects.filter(id__lt=partitions.first_id(THIRD)).exists()
        assert judge(config) == whole

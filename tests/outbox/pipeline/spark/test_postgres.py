"""Real tables, read by both readers, within one snapshot."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from django.db import connection

from outbox.ids import topic_number
from outbox.models import Inbox, Lane, State
from outbox.pipeline.conf import AuditSettings
from outbox.pipeline.job_config import business_of, pipeline_config
from outbox.pipeline.models import RecordedMessage, RecordedTopic
from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.archived import copies, drop_repeated_rows
from outbox.pipeline.spark.audit import audit
from outbox.pipeline.spark.history import FRAMES, open_history
from outbox.pipeline.spark.lake import RECORDED
from outbox.pipeline.spark.postgres import copy_history
from outbox.pipeline.spark.readers import jdbc_url, read_by_jdbc, read_by_psycopg, spark_schema
from outbox.pipeline.spark.statements import exported_snapshot
from project.shop.models import Customer, Order
from tests.factories import BatchFactory, DelayedFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id
from tests.outbox.pipeline.spark.tcp import reached_by_tcp

SOURCE = "SELECT id FROM outbox_source"
BROKER_TOPIC = "INSERT INTO outbox_embedded_topic (id, name, type, queues) VALUES (%s, 'orders', 'normal', 1) RETURNING id"
EMBEDDED = """
INSERT INTO outbox_embedded_message (topic_id, queue, pos, message_id, source, key, tag, headers, body, stored_at)
VALUES (%s, 0, %s, %s, %s, '', '', %s, '', now() - interval '1 hour')
"""
BEFORE = datetime.now(UTC) - timedelta(hours=1)


@pytest.fixture
def outbox(transactional_db):
    """Ten numbered messages, one of them split off; one waits, one is delayed. Number 4 is not in the inbox of cart."""
    topic = TopicFactory(name="orders")
    ids = [message_id(BEFORE + timedelta(milliseconds=n)) for n in range(12)]
    for one in ids:
        MessageRowFactory(id=one, topic=topic, created_at=BEFORE, about=f"shop.order:{one}", headers='{"ce-type": "OrderPlaced"}')
    sent = {"topic": topic, "state": State.SENT, "lane": 1, "sent_at": BEFORE, "claimed_at": BEFORE}
    BatchFactory(message_ids=ids[:6], first_seq=1, split=[3], **sent)
    BatchFactory(message_ids=ids[2:3], first_seq=3, **sent)
    BatchFactory(message_ids=ids[6:10], first_seq=7, **sent)
    TicketFactory(message=_row(ids[10], topic))
    DelayedFactory(message=_row(ids[11], topic), due_at=datetime.now(UTC) + timedelta(hours=1))
    Lane.objects.create(topic_id=topic.id, lane=1, last_seq=10)
    with connection.cursor() as cursor:
        cursor.execute(SOURCE)
        (source,) = cursor.fetchone()
        cursor.execute(BROKER_TOPIC, [topic_number("orders")])
        (embedded,) = cursor.fetchone()
        for number, one in enumerate(ids[:10], start=1):
            headers = f'{{"ce-lane": "1", "ce-number": "{number}"}}'
            cursor.execute(EMBEDDED, [embedded, number, str(one), source, headers])
            if number != 4:
                Inbox.objects.create(
                    consumer_group="cart",
                    idempotency_key=one,
                    message_id=one,
                    source=source,
                    topic="orders",
                    lane=1,
                    number=number,
                )
    return ids


def _row(id_, topic):
    return type("Row", (), {"id": id_, "topic_id": topic.id})()


@pytest.fixture
def config(outbox):
    made = pipeline_config(settle=timedelta(minutes=5), shuffle_partitions=2)
    groups = [group for group in made.groups if group.name == "cart"]
    with reached_by_tcp(made.outbox.url) as url:
        yield replace(made, groups=groups, business=[], outbox=replace(made.outbox, partitions=3, url=url))


@pytest.fixture(params=["jdbc", "python"])
def reader(request):
    if request.param == "jdbc":
        request.getfixturevalue("with_jar")
    return request.param


def copied(spark, config, folder, reader):
    source = replace(config.outbox, reader=reader)
    copy_history(spark, replace(config, outbox=source, brokers=[source]), str(folder))
    return open_history(spark, str(folder))


class TestAHistoryFromPostgreSQL:
    def test_is_what_the_tables_say(self, spark, config, outbox, tmp_path, reader):
        history = copied(spark, config, tmp_path, reader)

        places = {(row.message_id, row.number, row.state) for row in history.places.collect()}
        assert places == {
            *((str(one), number, "sent") for number, one in enumerate(outbox[:10], start=1)),
            (str(outbox[10]), None, "waiting"),
            (str(outbox[11]), None, "delayed"),
        }
        assert {(mark.topic, mark.lane, mark.first, mark.last) for mark in history.read_marks()} == {("orders", 1, 1, 10)}
        assert [history.frames[name].count() for name in ("messages", "broker", "inbox")] == [12, 10, 9]
        assert {row.type for row in history.messages.collect()} == {"OrderPlaced"}
        report = audit(spark, config, history)
        assert [(str(one.kind), one.group, one.first, one.ids) for one in report.findings] == [
            ("late", "", -1, (str(outbox[10]),)),
            ("lost", "cart", 4, (str(outbox[3]),)),
        ]

    def test_has_the_business_rows_that_a_condition_selects(self, spark, config, tmp_path, reader):
        customer = Customer.objects.create(number="17850", country="France")
        for invoice in ("536365", "636365"):
            Order.objects.create(invoice=invoice, customer=customer, country="France", invoiced_at=BEFORE, total=1)
        conditions = {"like": "b.invoice LIKE '5363%'", "either": "b.invoice ~ '^5' OR b.total > 5 -- paid"}
        entries = {name: AuditSettings("shop.Order", "OrderPlaced", where, "placed_at") for name, where in conditions.items()}

        history = copied(spark, replace(config, business=list(map(business_of, entries, entries.values()))), tmp_path, reader)

        about = f"shop.order:{Order.objects.get(invoice='536365').pk}"
        rows = history.frames["business"].collect()
        assert sorted((row.subject, row.about) for row in rows) == [("either", about), ("like", about)]

    def test_is_read_from_a_folder_whose_name_looks_like_a_pattern(self, spark, config, outbox, tmp_path):
        plain, other = (copied(spark, config, tmp_path / name, "python") for name in ("history", "history [a-b] {x,y} *"))

        assert other.frames["messages"].count() == plain.frames["messages"].count() > 0
        assert other.files.keys() == plain.files.keys() == {*other.frames}

    def test_names_a_column_that_an_older_schema_has_not(self, spark, config, tmp_path):
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE outbox_failed_delivery RENAME number TO seq")
        try:
            with pytest.raises(HistoryError, match=r"frame 'failed_deliveries' cannot be read: .*run migrate"):
                copied(spark, config, tmp_path, "python")
        finally:
            with connection.cursor() as cursor:
                cursor.execute("ALTER TABLE outbox_failed_delivery RENAME seq TO number")

    def test_cannot_be_read_from_where_nobody_answers(self, spark, config, tmp_path):
        nowhere = replace(config.outbox, url="postgresql://nobody@127.0.0.1:1/nothing")

        with pytest.raises(HistoryError, match="The database cannot be reached"):
            copy_history(spark, replace(config, outbox=nowhere, brokers=[]), str(tmp_path))


class TestASnapshot:
    QUERY = "SELECT last_seq AS part, last_seq AS number FROM outbox_lane"

    def read(self, spark, source, bounds, snapshot, reader):
        schema = type(FRAMES["places"])([FRAMES["places"]["number"]])
        if reader == "jdbc":
            return read_by_jdbc(spark, source, self.QUERY, bounds, snapshot)
        return read_by_psycopg(spark, source, self.QUERY, bounds, snapshot, schema)

    def test_is_one_moment_for_all_parts(self, spark, config, reader):
        with exported_snapshot(config.outbox.url) as (_, snapshot):
            Lane.objects.update(last_seq=99)
            found = self.read(spark, config.outbox, (1, 100), snapshot, reader).collect()

        assert [row.number for row in found] == [10]

    def test_that_is_gone_is_an_error(self, spark, config, reader):
        with exported_snapshot(config.outbox.url) as (_, snapshot):
            pass

        with pytest.raises(Exception, match=r"invalid snapshot identifier|snapshot .* does not exist"):
            self.read(spark, config.outbox, (1, 100), snapshot, reader).collect()


class TestAJdbcAddress:
    def test_is_made_of_libpqs(self):
        address, login = jdbc_url("postgresql://shop:s%40fe@db:5433/the%20shop?sslmode=require")

        assert address == "jdbc:postgresql://db:5433/the%20shop?sslmode=require"
        assert login == {"user": "shop", "password": "s@fe"}

    def test_has_the_options_and_certificates_of_libpqs(self):
        options = "options=-c%20search_path%3Dnorth%2Cpublic&sslrootcert=%2Fetc%2Fca%20of%20db.pem"

        address, _ = jdbc_url(f"postgresql://shop@db/shop?sslmode=verify-full&{options}")

        query = dict(parse_qsl(urlsplit(address.removeprefix("jdbc:")).query))
        assert query == {
            "sslmode": "verify-full",
            "options": "-c search_path=north,public",
            "sslrootcert": "/etc/ca of db.pem",
        }

    @pytest.mark.usefixtures("jar")
    def test_leads_to_the_same_schema(self, spark, config):
        source = replace(config.outbox, url=f"{config.outbox.url}?options={quote('-c search_path=pg_catalog')}")
        with exported_snapshot(source.url) as (_, snapshot):
            rows = read_by_jdbc(spark, source, "SELECT current_schema() AS schema", (0, 0), snapshot).collect()

        assert [row.schema for row in rows] == ["pg_catalog"]

    def test_cannot_be_a_socket(self):
        with pytest.raises(HistoryError, match='Set reader="python"'):
            jdbc_url("postgresql:///shop?host=/run/postgresql")


class TestWhatTheRecorderWroteDown:
    COPIES = (
        ("1 as it is", [("q", 1, 1)], 1),
        ("2 stored twice", [("q", 2, 1), ("q", 3, 1)], 2),
        ("3 handed out again after the recorder was killed", [("q", 4, 1), ("retry", 1, 2), ("retry", 2, 3)], 1),
        ("4 whose first delivery was never written", [("retry", 3, 2)], 1),
        ("5 stored twice, each handed out again", [("q", 5, 1), ("q", 6, 1), ("retry", 4, 2), ("retry", 5, 2)], 2),
        ("6 stored twice, only later deliveries written", [("q", 7, 1), ("retry", 6, 2), ("retry", 7, 2)], 2),
    )

    def test_has_a_row_for_each_copy_that_the_broker_has_stored(self, spark, config, outbox, tmp_path, reader):
        for number, (_, deliveries, _) in enumerate(self.COPIES, start=1):
            for queue, pos, delivery_count in deliveries:
                of = {"message_id": outbox[number - 1], "topic": "bills", "source": "us", "lane": 1, "number": number}
                RecordedMessage.objects.create(queue=queue, pos=pos, delivery_count=delivery_count, stored_at=BEFORE, **of)
        RecordedMessage.objects.create(message_id=outbox[0], topic="not ours", source="us")
        RecordedTopic.objects.create(topic="bills", broker="b", consumer_group="g", read_until=BEFORE)
        recorded = replace(config, brokers=[], recorded={"bills": 0.0}, outbox=replace(config.outbox, reader=reader))

        copy_history(spark, recorded, str(tmp_path))

        history = open_history(spark, str(tmp_path))
        rows = history.broker.where("topic = 'bills'").groupBy("number").count().collect()
        assert {row.number: row["count"] for row in rows} == {n: copies for n, (_, _, copies) in enumerate(self.COPIES, start=1)}
        assert history.broker.count() == sum(copies for *_, copies in self.COPIES)
        assert history.recorded["bills"].until == BEFORE


AT = datetime(2026, 1, 1, tzinfo=UTC)


class TestCopies:
    def test_are_those_that_postgresql_counts_with_each_place_once_however_late_it_comes_again(self, spark):
        rows = []

        def see(number, queue, pos, delivery_count, times=1):
            for _ in range(times):
                of = {"id": len(rows), "message_id": f"m{number}", "topic": "bills", "number": number, "lane": 1}
                rows.append(
                    {
                        **of,
                        "queue": queue,
                        "pos": pos,
                        "delivery_count": delivery_count,
                        "recorded_at": AT + timedelta(days=len(rows)),
                    }
                )

        for number, (_, deliveries, _) in enumerate(TestWhatTheRecorderWroteDown.COPIES, start=1):
            for place in deliveries:
                see(number, *place)
        see(7, "q", 8, 1, times=3)  # its row left the table, and it was handed out again
        see(8, "", None, 1, times=2)  # by a broker that does not say where a message lies
        see(9, "", None, 1)
        rows.append(rows[-1])  # in the database and in the lake
        schema = spark_schema(RECORDED)
        frame = spark.createDataFrame([tuple(row.get(name) for name in schema.names) for row in rows], schema).coalesce(1)

        found = Counter(row.number for row in copies(drop_repeated_rows(frame)).collect())

        expected = {number: many for number, (_, _, many) in enumerate(TestWhatTheRecorderWroteDown.COPIES, start=1)}
        assert found == {**expected, 7: 1, 8: 2, 9: 1}

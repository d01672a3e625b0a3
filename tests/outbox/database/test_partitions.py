"""Partitions of the message table. Each test uses days far from today, and drops them."""

import threading
from datetime import UTC, date, datetime, timedelta

import pytest
from django.db import connection as django_connection
from psycopg import errors

from outbox import database
from outbox.database import partitions
from outbox.models import MessageRow
from tests.factories import MessageRowFactory, message_id

pytestmark = pytest.mark.django_db(transaction=True)

DAY = date(2001, 2, 3)
NOON = datetime(2001, 2, 3, 12, tzinfo=UTC)
BRIEFLY = timedelta(milliseconds=150)

MAINTENANCE_WAITS = """
SELECT 1 FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'outbox maintenance' AND wait_event_type = 'Lock'
"""


@pytest.fixture(autouse=True)
def _drop_old_days():
    yield
    with django_connection.cursor() as cursor, database.connect("default") as own:
        for day in partitions.days(own):
            if day.year < 2020:
                cursor.execute(f"DROP TABLE {partitions.table_of(day)}")


@pytest.fixture
def connection():
    with database.connect("default") as own:
        yield own


@pytest.fixture
def schema_in_front(connection):
    """An empty schema, which comes before the tables' own in the search path of all new connections."""
    name = django_connection.settings_dict["NAME"]
    connection.execute(f'CREATE SCHEMA front; ALTER DATABASE "{name}" SET search_path = front, public')
    yield
    connection.execute(f'ALTER DATABASE "{name}" RESET search_path; DROP SCHEMA front CASCADE')


def table_holding(message):
    with django_connection.cursor() as cursor:
        cursor.execute("SELECT tableoid::regclass::text FROM outbox_message WHERE id = %s", [message.id])
        return cursor.fetchone()[0]


class TestMakeDays:
    def test_makes_today_and_the_days_ahead(self, monkeypatch, connection):
        monkeypatch.setattr(partitions, "DAYS_AHEAD", 2)

        made = partitions.create_partitions("default", today=DAY)

        assert made == [date(2001, 2, 3), date(2001, 2, 4), date(2001, 2, 5)]
        assert set(made) <= set(partitions.days(connection))

    def test_makes_nothing_twice(self):
        partitions.create_partitions("default", today=DAY)

        assert partitions.create_partitions("default", today=DAY) == []

    def test_sends_rows_to_their_day(self):
        partitions.create_partitions("default", today=DAY)

        message = MessageRowFactory(id=message_id(NOON))

        assert table_holding(message) == "outbox_message_20010203"

    def test_gives_each_day_the_indexes_of_the_table(self, connection):
        partitions.create_partitions("default", today=DAY)

        found = connection.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'outbox_message_20010203'").fetchall()

        columns = sorted(row[0].partition("USING btree ")[2] for row in found)
        assert columns == ["(about) WHERE (about IS NOT NULL)", "(id)", "(key) WHERE (key <> ''::text)"]

    def test_puts_each_day_into_the_schema_of_the_table(self, connection, schema_in_front):
        partitions.create_partitions("default", today=DAY)

        found = connection.execute("SELECT schemaname FROM pg_tables WHERE tablename = 'outbox_message_20010203'").fetchall()
        assert found == [("public",)]

    def test_makes_no_publisher_wait(self, monkeypatch):
        monkeypatch.setattr(partitions, "PATIENCE", BRIEFLY)
        with database.connect("default") as publisher, publisher.transaction():
            publisher.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, '')", [message_id()])

            made = partitions.create_partitions("default", today=DAY)

        assert DAY in made

    def test_lets_publishers_pass_while_a_reader_keeps_it_from_a_lock(self, connection):
        with database.connect("default") as reader, reader.transaction():
            reader.execute("SELECT count(*) FROM outbox_message_default")

            making = threading.Thread(target=partitions.create_partitions, args=["default"], kwargs={"today": DAY})
            making.start()
            connection.execute("SET lock_timeout = '2s'")
            connection.execute("SELECT count(*) FROM outbox_message_default")
            still_trying = making.is_alive()

        making.join()
        assert still_trying
        assert DAY in partitions.days(connection)

    def test_leaves_a_day_for_later_when_readers_do_not_end(self, monkeypatch):
        with database.connect("default") as reader, reader.transaction(), monkeypatch.context() as patch:
            patch.setattr(partitions, "PATIENCE", BRIEFLY)
            reader.execute("SELECT count(*) FROM outbox_message_default")

            assert partitions.create_partitions("default", today=DAY) == []

        assert DAY in partitions.create_partitions("default", today=DAY)

    def test_waits_its_turn_while_another_makes_days(self, monkeypatch):
        with database.connect("default") as other, other.transaction(), monkeypatch.context() as patch:
            patch.setattr(partitions, "PATIENCE", BRIEFLY)
            other.execute(partitions.LOCK_PARTITIONS)

            assert partitions.create_partitions("default", today=DAY) == []

        assert DAY in partitions.create_partitions("default", today=DAY)

    def test_makes_each_day_once_when_two_make_them(self):
        made = []

        def make() -> None:
            made.extend(partitions.create_partitions("default", today=DAY))

        makers = [threading.Thread(target=make) for _ in range(2)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()

        assert sorted(made) == [DAY + timedelta(days=n) for n in range(8)]


class TestForeignPartitions:
    """Partitions that an operator has renamed or attached."""

    @pytest.fixture(autouse=True, params=["outbox_message_old", "outbox_message_p20010203", "outbox_message_20019999"])
    def foreign(self, request, connection):
        partitions.create_partition(connection, DAY)
        connection.execute(f"ALTER TABLE outbox_message_20010203 RENAME TO {request.param}")
        yield request.param
        connection.execute(f"DROP TABLE {request.param}")

    def test_are_no_days(self, connection):
        assert DAY not in partitions.days(connection)

    def test_keep_their_days_and_are_named(self, connection, foreign, caplog):
        made = partitions.create_partitions("default", today=DAY)

        assert made == [DAY + timedelta(days=n) for n in range(1, 8)]
        assert f'would overlap partition "{foreign}"' in caplog.text


class TestStrays:
    def test_move_from_the_default_partition_to_their_day(self):
        message = MessageRowFactory(id=message_id(NOON))
        assert table_holding(message) == "outbox_message_default"

        partitions.create_partitions("default", today=DAY)

        assert table_holding(message) == "outbox_message_20010203"
        assert bytes(MessageRow.objects.get(id=message.id).body) == message.body

    def test_move_also_when_their_day_is_over(self):
        message = MessageRowFactory(id=message_id(NOON))

        partitions.create_partitions("default", today=date(2001, 2, 20))

        assert table_holding(message) == "outbox_message_20010203"

    def test_stay_when_their_day_is_far_ahead(self, alerts):
        message = MessageRowFactory(id=message_id(datetime(2400, 1, 1, tzinfo=UTC)))

        partitions.create_partitions("default", today=DAY)

        assert table_holding(message) == "outbox_message_default"
        assert "2400-01-01" in alerts[0]["reason"]

    def test_send_an_alert(self, alerts):
        MessageRowFactory(id=message_id(NOON))

        partitions.create_partitions("default", today=DAY)

        assert len(alerts) == 1
        assert "messages of 2001-02-03 in outbox_message_default" in alerts[0]["reason"]

    def test_are_moved_when_they_commit_while_their_day_is_made(self, connection):
        with database.connect("default") as publisher:
            publisher.execute("BEGIN")
            stray = message_id(NOON)
            publisher.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, '')", [stray])
            making = threading.Thread(target=partitions.create_partitions, args=["default"], kwargs={"today": DAY})
            making.start()
            while making.is_alive() and connection.execute(MAINTENANCE_WAITS).fetchone() is None:
                pass
            publisher.execute("COMMIT")
            making.join()

        assert table_holding(MessageRow(id=stray)) == "outbox_message_20010203"

    def test_move_at_the_first_attempt_although_publishers_go_on(self, connection, monkeypatch):
        stop = threading.Event()

        def publish():
            with database.connect("default") as publisher:
                while not stop.is_set():
                    stray = message_id(NOON)
                    publisher.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, '')", [stray])
                    published.set()

        published = threading.Event()
        publisher = threading.Thread(target=publish)
        publisher.start()
        published.wait(10)
        monkeypatch.setattr(partitions, "PATIENCE", timedelta(0))
        made = partitions.create_partition(connection, DAY)
        stop.set()
        publisher.join()

        assert made
        assert connection.execute("SELECT count(*) FROM outbox_message_default").fetchone() == (0,)


class TestWithShortLocks:
    def test_gives_up_when_patience_is_over(self, connection, monkeypatch):
        with database.connect("default") as other:
            other.execute("SELECT pg_advisory_lock(7711, 0)")
            monkeypatch.setattr(partitions, "PATIENCE", timedelta(0))

            with pytest.raises(errors.LockNotAvailable):
                partitions.with_short_locks(connection, lambda: connection.execute(partitions.LOCK_PARTITIONS))

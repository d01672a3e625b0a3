from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from unittest.mock import Mock

import psycopg
import pytest
from django.db import connection, connections

from outbox.brokers.memory import MemoryBroker
from outbox.errors import ConfigurationError
from outbox.pipeline.job_config import database_source, pipeline_config
from outbox.pipeline.models import RecordedTopic

SETTLE = timedelta(minutes=5)
OLDEST_DAY = """
SELECT min(to_date(right(inhrelid::regclass::text, 8), 'YYYYMMDD')) FROM pg_inherits
WHERE inhparent = 'outbox_message'::regclass AND inhrelid <> 'outbox_message_default'::regclass
"""
BORN_LONG_AGO = "UPDATE django_migrations SET applied = now() - interval '1 year' WHERE app = 'outbox'"

FOREIGN_PARTITION = """
CREATE TABLE outbox_message_p20010203 PARTITION OF outbox_message
FOR VALUES FROM ('00000000-0000-0000-0000-000000000000') TO ('00000000-0000-0000-0000-000000000009')
"""


@pytest.fixture(autouse=True)
def _database(db):
    pass


class TestWhatTheJobIsTold:
    def test_is_what_the_shop_says(self):
        config = pipeline_config(settle=SETTLE)

        (orders,) = [entry for entry in config.business if entry.name == "orders"]
        assert (orders.topic, orders.type, orders.about) == ("orders", "OrderPlaced", "shop.order")
        assert (orders.table, orders.key, orders.at) == ('"shop_order"', 'b."id"::text', '"placed_at"')
        groups = {group.name: group.topics for group in config.groups}
        assert groups["points"] == ["order-cancellations", "orders"]
        assert config.seen_topics == ["order-cancellations", "orders", "shipments"]
        assert config.settle_seconds == 300

    def test_names_the_database_by_a_url(self):
        config = pipeline_config(settle=SETTLE)

        assert config.outbox.url.startswith("postgresql://")
        assert connection.settings_dict["NAME"] in config.outbox.url
        assert [broker.url for broker in config.brokers] == [config.outbox.url]

    def test_names_the_schema_and_the_role_of_the_database_but_no_time_limit(self, monkeypatch):
        options = {"options": r'-c search_path="My\ \\schema",public -c statement_timeout=1min', "assume_role": "pg_monitor"}
        settings = {**connection.settings_dict, "OPTIONS": connection.settings_dict["OPTIONS"] | options}
        with monkeypatch.context() as patch:
            patch.setitem(connections.settings, "north", settings)
            url = database_source("north").url
        del connections["north"]
        with psycopg.connect(url) as opened:
            names = ("search_path", "role", "statement_timeout")
            found = [opened.execute("SELECT current_setting(%s)", [name]).fetchone()[0] for name in names]

        assert found == [r'"My \schema",public', "pg_monitor", "0"]

    def test_names_it_without_a_home_directory_too(self, monkeypatch):
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))

        assert pipeline_config(settle=SETTLE).outbox.url.startswith("postgresql://")

    def test_leaves_out_what_may_have_been_pruned(self):
        assert pipeline_config(settle=SETTLE).since is None
        with connection.cursor() as cursor:
            cursor.execute(BORN_LONG_AGO)

        assert pipeline_config(settle=SETTLE).since is not None

    def test_leaves_out_what_was_pruned_by_a_shorter_retention_than_today_s(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "RETENTION": timedelta(days=730)}
        with connection.cursor() as cursor:
            cursor.execute(BORN_LONG_AGO)
            cursor.execute(OLDEST_DAY)
            (oldest,) = cursor.fetchone()

        config = pipeline_config(settle=SETTLE)

        assert datetime.combine(oldest, time(), UTC) < config.since < datetime.now(UTC)

    def test_takes_a_partition_that_an_operator_has_attached_for_no_day(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "RETENTION": timedelta(days=730)}
        with connection.cursor() as cursor:
            cursor.execute(BORN_LONG_AGO)
            before = pipeline_config(settle=SETTLE).since
            cursor.execute(FOREIGN_PARTITION)

        assert pipeline_config(settle=SETTLE).since >= before

    def test_is_with_an_archive_where_that_lies_and_what_may_have_been_pruned_without(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"ARCHIVE": {"PATH": "/srv/lake"}}}
        with connection.cursor() as cursor:
            cursor.execute(BORN_LONG_AGO)

        config = pipeline_config(settle=SETTLE, archived=True)

        assert config.since is None
        assert (config.archived.path, config.archived.kept_seconds) == ("/srv/lake/default", 7 * 86400)
        assert config.archived.born < datetime.now(UTC) - timedelta(days=300)
        assert abs(config.archived.live_since - pipeline_config(settle=SETTLE).since) < timedelta(minutes=1)

    @pytest.mark.parametrize(
        ("entry", "said"),
        [
            ({"MODEL": "shop.Odrer", "EXPECTS": "OrderPlaced"}, r"\[\"orders\"\] has MODEL 'shop.Odrer'.* Write \"app.Model\""),
            (
                {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", "WHERE": "b.totla > 0"},
                r"\[\"orders\"\] cannot be read from database 'default': column b.totla does not exist. Correct",
            ),
        ],
    )
    def test_is_refused_where_it_names_what_is_not_there(self, settings, entry, said):
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"AUDIT": {"orders": entry}}}

        with pytest.raises(ConfigurationError, match=said):
            pipeline_config(settle=SETTLE)


class TestTheBrokersSide:
    @pytest.fixture(autouse=True)
    def _rabbit(self, settings):
        memory = {"BACKEND": "outbox.brokers.memory.MemoryBroker", "OPTIONS": {}}
        topics = {"bills": {"BROKER": "other", "TYPE": "normal"}, "later": {"BROKER": "other", "TYPE": "delay"}}
        brokers = {**settings.OUTBOX["BROKERS"], "other": memory}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": brokers, "TOPICS": {**settings.OUTBOX["TOPICS"], **topics}}

    def test_of_another_broker_is_what_a_recorder_wrote_down(self):
        for topic in ("bills", "later", "orders", "a topic that was given up"):
            RecordedTopic.objects.create(topic=topic, broker="other", consumer_group="recorder")

        config = pipeline_config(settle=SETTLE)

        assert config.seen_topics == ["order-cancellations", "orders", "shipments", "bills", "later"]
        assert config.recorded == {"bills": 0.0, "later": MemoryBroker.max_delay.total_seconds()}

    def test_of_another_broker_is_not_seen_where_nothing_is_recorded(self):
        config = pipeline_config(settle=SETTLE)

        assert config.seen_topics == ["order-cancellations", "orders", "shipments"]
        assert config.recorded == {}

    def test_asks_nothing_of_a_broker_without_topics(self, settings):
        unused = {"BACKEND": "no.such.Broker"}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {**settings.OUTBOX["BROKERS"], "unused": unused}}

        assert pipeline_config(settle=SETTLE).seen_topics == ["order-cancellations", "orders", "shipments"]

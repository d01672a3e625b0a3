import pytest
from django.db import connections

from outbox import database
from tests.outbox.checks.conftest import BROKERS

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _brokers(settings):
    settings.OUTBOX = {"BROKERS": BROKERS}


class TestE024:
    def test_finds_a_server_that_is_too_old(self, found, monkeypatch):
        monkeypatch.setattr(connections["default"].features, "minimum_database_version", (99,))

        (problem,) = found(databases=["default"])

        assert problem.id == "outbox.E024"
        assert problem.msg.startswith("Database 'default': PostgreSQL 99 or later is required")
        assert problem.hint


class TestDatabaseUnfit:
    @pytest.fixture
    def renamed(self):
        """Rename a table while a test runs."""
        with database.connect("default") as server:
            server.execute("ALTER TABLE outbox_gap RENAME TO elsewhere")
            yield
            server.execute("ALTER TABLE elsewhere RENAME TO outbox_gap")

    def test_finds_a_table_that_is_missing(self, found, renamed):
        (problem,) = found(databases=["default"])

        assert (problem.id, problem.obj) == ("outbox.database_unfit", "database 'default'")
        assert problem.msg == "It lacks the tables outbox_gap."
        assert problem.hint.startswith("Run manage.py migrate --database default")
        assert "If there is nothing to migrate, the tables were dropped, or are of version 0.1.0" in problem.hint

    @pytest.mark.parametrize("command", ["migrate", "migrate_schemas"])
    def test_is_silent_before_a_migration(self, found, renamed, monkeypatch, command):
        monkeypatch.setattr("sys.argv", ["manage.py", command])

        assert found(databases=["default"]) == []


class TestE055:
    @pytest.fixture
    def latin1(self, monkeypatch):
        """Let `other` be a database that cannot store each character."""
        name = f"{connections['other'].settings_dict['NAME']}_latin1"
        with database.connect("default") as server:
            server.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
            connections["other"].close()
            with monkeypatch.context() as patch:
                patch.setitem(connections["other"].settings_dict, "NAME", name)
                yield
                connections["other"].close()
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def test_finds_a_database_that_cannot_store_each_character(self, found, latin1):
        (problem,) = [one for one in found(databases=["other"]) if one.id == "outbox.E055"]

        assert problem.msg.startswith("Database 'other' is encoded in LATIN1")
        assert "ENCODING 'UTF8'" in problem.hint


class TestW025:
    def test_finds_none_where_there_is_none(self, found):
        assert found(databases=["default", "other"]) == []

    def test_asks_no_database_unless_it_is_named(self, found, monkeypatch):
        monkeypatch.setattr(database, "connect", None)
        monkeypatch.setattr("outbox.database.connections.connect", None)

        assert found() == []

    def test_leaves_a_database_that_is_away_to_others(self, found, monkeypatch):
        connections["default"].close()
        monkeypatch.setitem(connections["default"].settings_dict, "PORT", 1)

        assert found(databases=["default"]) == []


class TestW049:
    @pytest.fixture(autouse=True)
    def _keeps_order(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"moved": {"TYPE": "fifo"}}}

    def test_warns_of_publishers_that_may_be_frozen_in_a_transaction(self, found):
        (problem,) = found(databases=["default"])

        assert problem.id == "outbox.W049"
        assert "idle_in_transaction_session_timeout" in problem.hint

    def test_is_content_where_such_a_transaction_ends(self, found):
        with connections["default"].cursor() as cursor:
            cursor.execute("SET idle_in_transaction_session_timeout = '60s'")
        try:
            assert found(databases=["default"]) == []
        finally:
            connections["default"].close()

    def test_does_not_ask_where_no_topic_keeps_order(self, found, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"drawn": {"TYPE": "normal"}}}

        assert found(databases=["default"]) == []


class TestE045:
    def test_finds_an_alias_that_leads_to_another_database(self, found, settings):
        settings.OUTBOX = {**settings.OUTBOX, "DIRECT_DATABASES": {"default": "other"}}

        (problem,) = found(databases=["default"])

        assert problem.id == "outbox.E045"
        assert problem.msg.startswith("'other' should bypass the pooler of database 'default'")
        assert problem.hint

    def test_finds_none_where_both_lead_to_one(self, found, settings, monkeypatch):
        monkeypatch.setitem(connections.settings, "direct", {**connections["default"].settings_dict})
        settings.OUTBOX = {**settings.OUTBOX, "DIRECT_DATABASES": {"default": "direct"}}

        assert found(databases=["default"]) == []

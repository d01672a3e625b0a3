from datetime import timedelta

import psycopg
import pytest
from django.db import connections

from outbox import database
from outbox.check_backs import sources
from tests.outbox.check_backs.halves import source_of

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


class TestAliasOf:
    @pytest.mark.parametrize("alias", ["default", "other"])
    def test_finds_the_database_that_the_token_names(self, alias):
        token = f"{source_of(alias)}:17:1:1"

        assert sources.alias_of(token, otherwise="nowhere") == alias

    @pytest.mark.parametrize("token", ["", "unreadable", "urn:uuid:elsewhere:17:1:1"])
    def test_falls_back_where_the_token_names_none(self, token):
        assert sources.alias_of(token, otherwise="default") == "default"

    def test_passes_by_a_database_that_is_away(self, monkeypatch):
        monkeypatch.setitem(connections["default"].settings_dict, "PORT", 1)

        assert sources.alias_of(f"{source_of('other')}:17:1:1", otherwise="default") == "other"

    def test_remembers_what_it_found(self, monkeypatch):
        token = f"{source_of()}:17:1:1"
        sources.alias_of(token, otherwise="nowhere")

        monkeypatch.setattr(sources, "connect", None)

        assert sources.alias_of(token, otherwise="nowhere") == "default"

    def test_prefers_the_primary_to_its_replica(self, other_is_a_replica):
        assert sources.alias_of(f"{source_of()}:17:1:1", otherwise="nowhere") == "default"

    @pytest.fixture
    def other_is_a_replica(self):
        """The second database with the first one's source, and read-only."""
        source, name = source_of("other"), connections["other"].settings_dict["NAME"]
        with database.connect("other") as connection:
            connection.execute("UPDATE outbox_source SET id = %s", [source_of()])
            connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
            yield
            connection.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
            connection.execute("UPDATE outbox_source SET id = %s", [source])


class TestConnect:
    @pytest.mark.parametrize(("limit", "seen"), [("lock_timeout", "123ms"), ("statement_timeout", "5s")])
    def test_bounds_every_statement(self, settings, limit, seen):
        settings.OUTBOX = {"CHECK_BACK": {"LOCK_TIMEOUT": timedelta(seconds=0.123)}}

        with sources.connect("default") as connection:
            assert connection.execute(f"SHOW {limit}").fetchone() == (seen,)

    def test_takes_no_limit_for_the_shortest(self, settings):
        settings.OUTBOX = {"CHECK_BACK": {"LOCK_TIMEOUT": timedelta(microseconds=1)}}

        with sources.connect("default") as connection:
            assert connection.execute("SHOW lock_timeout").fetchone() == ("1ms",)

    def test_gives_up_on_a_server_that_never_answers(self, monkeypatch, silent_port):
        monkeypatch.setattr(sources, "STATEMENT_TIMEOUT", timedelta(seconds=1))
        monkeypatch.setitem(connections["default"].settings_dict, "HOST", "127.0.0.1")
        monkeypatch.setitem(connections["default"].settings_dict, "PORT", silent_port)

        with pytest.raises(psycopg.OperationalError, match="timeout"):
            sources.connect("default")

import subprocess
import sys

import pytest
from django.db import connections

from outbox.checks import databases
from tests.outbox.checks.conftest import BROKERS, MEMORY


@pytest.fixture(autouse=True)
def _brokers(settings):
    settings.OUTBOX = {"BROKERS": BROKERS}


class TestE007:
    def test_finds_a_database_that_is_not_postgresql(self):
        code = (
            "from django.conf import settings; import django\n"
            "sqlite = {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}\n"
            "settings.configure(INSTALLED_APPS=['outbox'], DATABASES={'default': sqlite},\n"
            f"    OUTBOX={{'BROKERS': {{'default': {{'BACKEND': '{MEMORY}'}}}}}})\n"
            "django.setup(); from django.core.management import call_command; call_command('migrate', skip_checks=False)"
        )

        outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        assert outcome.returncode == 1
        assert (
            "(outbox.E007) Database 'default' is sqlite. The outbox needs PostgreSQL 14 or later, with psycopg 3."
            in outcome.stderr
        )

    def test_finds_psycopg2(self, found, monkeypatch):
        monkeypatch.setattr(databases, "is_psycopg3", False)

        assert ["is used with psycopg2" in problem.msg for problem in found()] == [True]

    def test_finds_one_that_only_routers_name(self, monkeypatch):
        monkeypatch.setattr(databases.router, "db_for_write", lambda model: "nowhere")

        (problem,) = databases.check_engine()

        assert problem.msg == "Routers put the app outbox into the database 'nowhere', which is not in DATABASES."
        assert problem.hint == "Let db_for_write() of the routers return one of these, or None: default, other."


class TestE059:
    def test_finds_a_database_that_commits_nothing(self, found, monkeypatch):
        monkeypatch.setitem(connections["other"].settings_dict, "AUTOCOMMIT", False)

        (problem,) = found()

        assert problem.id == "outbox.E059"
        assert problem.hint == 'Remove AUTOCOMMIT from DATABASES["other"].'


class TestE044:
    @pytest.mark.parametrize(
        ("named", "says"),
        [
            ({"default": "nowhere"}, "does not name PostgreSQL databases of DATABASES"),
            ({"nowhere": "other"}, "does not name PostgreSQL databases of DATABASES"),
            ({"default": "default"}, "has one alias on both sides"),
        ],
    )
    def test_finds_an_alias_that_cannot_lead_around_a_pooler(self, found, settings, named, says):
        settings.OUTBOX = {**settings.OUTBOX, "DIRECT_DATABASES": named}

        (problem,) = found()

        assert problem.id == "outbox.E044"
        assert says in problem.msg
        assert problem.hint

    def test_finds_nothing_wrong_with_two_aliases(self, found, settings):
        settings.OUTBOX = {**settings.OUTBOX, "DIRECT_DATABASES": {"default": "other"}}

        assert found() == []


class ReadsElsewhere:
    def __init__(self, app="outbox"):
        self.app = app

    def db_for_read(self, model, **hints):
        return "other" if model._meta.app_label == self.app else None

    def allow_migrate(self, db, app_label, **hints):
        return db == "default"


class WritesElsewhere:
    def db_for_read(self, model, **hints):
        return "other" if model._meta.app_label == "outbox" else None

    db_for_write = db_for_read


class TestW021:
    @pytest.mark.parametrize("app", ["outbox", "outbox_embedded", "outbox_pipeline"])
    def test_warns_of_reads_that_go_elsewhere(self, found, routed, app):
        routed(ReadsElsewhere(app))

        (problem,) = found()

        assert problem.id == "outbox.W021"
        assert problem.msg == f"The routers read the models of the app {app} from 'other' and write them to 'default'."
        assert "db_for_read()" in problem.hint

    def test_warns_of_tables_in_a_replica(self, found, monkeypatch):
        monkeypatch.setitem(connections["other"].settings_dict["TEST"], "MIRROR", "default")

        (problem,) = found()

        assert problem.id == "outbox.W021"
        assert problem.msg.startswith("Database 'other' is a replica of 'default', but the routers allow the outbox's tables")
        assert "allow_migrate() return False for 'other'" in problem.hint


class TestW022:
    def test_warns_of_an_outbox_apart_from_the_rows(self, found, routed):
        routed(WritesElsewhere())

        (problem,) = found()

        assert problem.id == "outbox.W022"
        assert problem.msg.startswith("The routers write messages to 'other' and all other models to 'default'")
        assert problem.hint

    def test_is_quiet_where_some_rows_are_with_it(self, found, routed):
        class OrdersElsewhereToo(WritesElsewhere):
            def db_for_read(self, model, **hints):
                return "other" if model._meta.app_label == "outbox" or model._meta.label == "shop.Order" else None

            db_for_write = db_for_read

        routed(OrdersElsewhereToo())

        assert found() == []


class TestW023:
    @pytest.mark.parametrize(("has_pooler", "threshold", "ids"), [(True, 5, ["outbox.W023"]), (True, None, []), (False, 5, [])])
    def test_warns_of_prepared_statements_behind_a_pooler(self, found, monkeypatch, has_pooler, threshold, ids):
        for alias in connections:
            monkeypatch.setitem(connections[alias].settings_dict, "DISABLE_SERVER_SIDE_CURSORS", False)
        monkeypatch.setitem(connections["default"].settings_dict, "DISABLE_SERVER_SIDE_CURSORS", has_pooler)
        monkeypatch.setitem(connections["default"].settings_dict["OPTIONS"], "prepare_threshold", threshold)

        problems = found()

        assert [problem.id for problem in problems] == ids
        assert all(problem.hint for problem in problems)

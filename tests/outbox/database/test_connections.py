"""Connections beside Django's."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
from django.conf import settings
from django.db import DataError, connections

from outbox import database


@pytest.mark.django_db
class TestConnect:
    def test_has_no_statement_compiled(self):
        with database.connect("default") as connection:
            assert connection.execute("SHOW jit").fetchone() == ("off",)

    def test_has_the_settings_that_were_asked_for(self):
        with database.connect("default", settings={"statement_timeout": "3s"}) as connection:
            assert connection.execute("SHOW statement_timeout").fetchone() == ("3s",)

    @pytest.mark.parametrize("threshold", [None, 0, 3])
    def test_prepares_statements_as_the_options_say(self, threshold, monkeypatch):
        monkeypatch.setitem(connections["default"].settings_dict["OPTIONS"], "prepare_threshold", threshold)

        with database.connect("default") as connection:
            assert connection.prepare_threshold == threshold

    def test_prepares_statements_as_psycopg_does_where_the_options_say_nothing(self, monkeypatch):
        monkeypatch.delitem(connections["default"].settings_dict["OPTIONS"], "prepare_threshold")

        with database.connect("default") as connection:
            assert connection.prepare_threshold == 5


ADD = "SELECT %(one)s::int + %(other)s::int"


class TestAssumeRole:
    def test_is_the_role_of_our_own_connections_too(self, transactional_db):
        role = "outbox_owner_of_a_test"
        with database.connect("default") as own:
            own.execute(f"CREATE ROLE {role}")
        options = connections["default"].settings_dict["OPTIONS"]
        options["assume_role"] = role
        try:
            with database.connect("default") as own:
                [current] = own.execute("SELECT current_user").fetchone()
        finally:
            del options["assume_role"]
            with database.connect("default") as own:
                own.execute(f"DROP ROLE {role}")

        assert current == role


@pytest.mark.django_db(transaction=True)
class TestKeptCursor:
    def test_is_the_same_for_a_statement_as_long_as_the_connection_lives(self):
        first = database.kept_cursor("default", ADD)

        again, another = database.kept_cursor("default", ADD), database.kept_cursor("default", "SELECT 1")
        connections["default"].close()
        reopened = database.kept_cursor("default", ADD)

        assert again.cursor is first.cursor
        assert another.cursor is not first.cursor
        assert reopened.cursor is not first.cursor
        assert reopened.execute(ADD, {"one": 1, "other": 2}).fetchone() == (3,)

    def test_serves_its_statement_after_an_error(self):
        with pytest.raises(DataError):
            database.kept_cursor("default", ADD).execute(ADD, {"one": "one", "other": 2})

        assert database.kept_cursor("default", ADD).execute(ADD, {"one": 1, "other": 2}).fetchone() == (3,)

    def test_ends_with_its_thread(self):
        found = []

        def ask():
            database.kept_cursor("default", ADD).execute(ADD, {"one": 1, "other": 2})
            found.append(weakref.ref(connections["default"].connection))
            connections["default"].close()

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        gc.collect()

        assert found[0]() is None

    def test_is_logged_as_a_cursor_of_djangos(self, django_assert_num_queries):
        with django_assert_num_queries(2):
            for other in (2, 3):
                database.kept_cursor("default", ADD).execute(ADD, {"one": 1, "other": other})


# A test run of a project whose alias "direct" leads around the pooler of "default".
TEST_RUN = """
import django
from project import settings

settings.DATABASES["default"]["TEST"] = {"NAME": "test_of_a_mirror"}
settings.DATABASES["direct"] = {**settings.DATABASES["default"], "TEST": {"MIRROR": "default"}}
settings.OUTBOX["DIRECT_DATABASES"] = {"default": "direct"}
django.setup()

from django.core.checks import run_checks
from django.test.utils import setup_databases, teardown_databases
from outbox import database

made = setup_databases(verbosity=0, interactive=False, serialized_aliases=())
with database.connect_session("default") as connection:
    print(connection.info.dbname, database.outbox_databases(), run_checks(databases=["default", "direct"]))
teardown_databases(made, verbosity=0)
"""


class TestConnectSession:
    def test_leads_to_the_test_database_by_an_alias_that_mirrors_it(self):
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "project.settings"}

        done = subprocess.run(
            [sys.executable, "-c", TEST_RUN], cwd=settings.BASE_DIR, env=environment, capture_output=True, text=True
        )

        assert (done.stdout, done.returncode) == ("test_of_a_mirror ['default'] []\n", 0), done.stderr

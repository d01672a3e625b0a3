"""Connections of our own."""

import os
import subprocess
import sys

import pytest
from django.conf import settings
from django.db import connections

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

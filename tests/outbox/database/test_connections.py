"""Connections of our own."""

import pytest
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

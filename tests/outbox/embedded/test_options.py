"""OPTIONS: each wrong value is reported, with a hint."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from outbox import database
from outbox.embedded import EmbeddedBroker
from outbox.errors import ConfigurationError
from outbox.message import TopicSpec, TopicType

ORDERS = TopicSpec("orders", TopicType.NORMAL)


class TestCheckOptions:
    def test_finds_nothing_wrong_with_none(self):
        assert EmbeddedBroker.check_settings({}) == []

    @pytest.mark.parametrize(
        ("options", "said", "hint"),
        [
            ({"DATABAS": "default"}, "DATABAS", "Did you mean DATABASE?"),
            ({"DATABASE": "nowhere"}, "'nowhere', which is not in DATABASES", "default"),
            ({"DATABASE": 3}, 'OPTIONS["DATABASE"] has a wrong value', "Correct it."),
            ({"START": "middle"}, 'OPTIONS["START"] has a wrong value', "Choices are: 'earliest', 'latest'."),
            ({"CHECK_LIMIT": 0}, 'OPTIONS["CHECK_LIMIT"] has a wrong value', "Correct it."),
            ({"CHECK_AFTER": timedelta()}, "CHECK_AFTER", "Correct it."),
            ({"CHECK_INTERVAL": timedelta(seconds=-1)}, "CHECK_INTERVAL", "Correct it."),
            ({"STATEMENT_TIMEOUT": 30}, 'OPTIONS["STATEMENT_TIMEOUT"] has a wrong value', "Write timedelta(seconds=...)"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_names_what_is_wrong(self, options: dict[str, Any], said: str, hint: str):
        [problem] = EmbeddedBroker.check_settings(options)

        assert problem.is_serious()
        assert said in problem.text
        assert hint in problem.hint

    def test_finds_a_database_that_is_not_postgresql(self, monkeypatch):
        monkeypatch.setattr(connections["other"], "vendor", "sqlite")

        [problem] = EmbeddedBroker.check_settings({"DATABASE": "other"})

        assert problem.text == "OPTIONS[\"DATABASE\"] is 'other', which is not PostgreSQL."

    def test_leave_a_default_that_was_not_named_to_the_check_of_databases(self, monkeypatch):
        monkeypatch.setattr(connections["default"], "vendor", "sqlite")

        assert EmbeddedBroker.check_settings({}) == []

    def test_finds_a_default_that_is_left_empty_for_routers(self, monkeypatch, settings):
        monkeypatch.setattr(connections["default"], "vendor", "unknown")  # as of Django's backend for an empty one
        settings.DATABASE_ROUTERS = [EverythingToOther()]

        [problem] = EmbeddedBroker.check_settings({})

        assert problem.text == "OPTIONS[\"DATABASE\"] is 'default', which is not PostgreSQL."
        assert problem.hint == 'Name a PostgreSQL database of DATABASES. The default is "default".'


class EverythingToOther:
    def db_for_write(self, model, **hints):
        return "other"


class TestTheTimes:
    def test_of_a_send_are_those_of_connecting_and_of_two_statements(self):
        options = {"STATEMENT_TIMEOUT": timedelta(seconds=8)}

        assert EmbeddedBroker.limits(options, ORDERS).send == timedelta(seconds=5 + 2 * 8)

    def test_of_a_half_message_end_when_it_is_parked(self):
        options = {"CHECK_AFTER": timedelta(seconds=6), "CHECK_INTERVAL": timedelta(seconds=10), "CHECK_LIMIT": 7}

        assert EmbeddedBroker.limits(options, ORDERS).check_back == timedelta(seconds=6 + 10 + 20 + 40 + 80 + 160 + 160 + 160)


class TestBroker:
    def test_refuses_unknown_options(self):
        with pytest.raises(ConfigurationError, match="Did you mean CHECK_LIMIT"):
            EmbeddedBroker("default", {"CHECK_LIMITS": 3}, [])

    def test_opens_no_connection_before_it_is_used(self, monkeypatch):
        opened = []
        monkeypatch.setattr(database, "connect", lambda *args, **kwargs: opened.append(args))

        EmbeddedBroker("default", {"DATABASE": "default"}, [])

        assert opened == []

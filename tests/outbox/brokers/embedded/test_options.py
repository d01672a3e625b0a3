"""OPTIONS: each wrong value is named, with a hint."""

from datetime import timedelta
from typing import Any

import pytest

from outbox.brokers.embedded import EmbeddedBroker
from outbox.errors import ConfigurationError


class TestCheckOptions:
    def test_finds_nothing_wrong_with_none(self):
        assert EmbeddedBroker.check_options({}) == []

    @pytest.mark.parametrize(
        ("options", "said", "hint"),
        [
            ({"DATABAS": "default"}, "DATABAS", "Did you mean DATABASE?"),
            ({"DATABASE": "nowhere"}, "'nowhere', which is not in DATABASES", "default"),
            ({"DATABASE": 3}, "$.DATABASE", "Known are DATABASE"),
            ({"START": "middle"}, "$.START", "Known are"),
            ({"CHECK_LIMIT": 0}, "$.CHECK_LIMIT", "Known are"),
            ({"CHECK_AFTER": timedelta()}, "CHECK_AFTER", "Correct it."),
            ({"CHECK_INTERVAL": timedelta(seconds=-1)}, "CHECK_INTERVAL", "Correct it."),
            ({"STATEMENT_TIMEOUT": 30}, "$.STATEMENT_TIMEOUT", "Known are"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_names_what_is_wrong(self, options: dict[str, Any], said: str, hint: str):
        [problem] = EmbeddedBroker.check_options(options)

        assert problem.is_error
        assert said in problem.text
        assert hint in problem.hint


class TestBroker:
    def test_refuses_unknown_options(self):
        with pytest.raises(ConfigurationError, match="Did you mean CHECK_LIMIT"):
            EmbeddedBroker("default", {"CHECK_LIMITS": 3}, [])

    def test_opens_no_connection_before_it_is_used(self):
        broker = EmbeddedBroker("default", {"DATABASE": "default"}, [])

        assert broker._link._connection is None

from contextlib import closing

import pytest

from outbox.brokers.capabilities import NeedsCheckLoop
from outbox.brokers.memory import MemoryBroker
from outbox.check_backs import loop
from outbox.check_backs.loop import LIMIT, CheckLoop, brokers_to_ask_for, make_asker
from outbox.embedded import EmbeddedBroker
from outbox.errors import BrokerUnavailable, ConfigurationError
from outbox.message import COMMIT, Half
from tests.check_back_secrets import OTHER_SECRET, SECRET

HALF = Half("orders", "m", "1")


class TestMakeAsker:
    def test_asks_in_this_process_without_a_url(self, monkeypatch):
        monkeypatch.setattr(loop, "in_process", lambda alias: lambda half: (alias, half))

        assert make_asker("other")(HALF) == ("other", HALF)

    def test_asks_over_http_with_a_url(self, settings, monkeypatch):
        settings.OUTBOX = {"CHECK_BACK": {"URL": "https://shop.example/check-back/", "SECRETS": [SECRET, OTHER_SECRET]}}
        monkeypatch.setattr(loop, "over_http", lambda url, secret: lambda half: (url, secret))

        assert make_asker("other")(HALF) == ("https://shop.example/check-back/", SECRET)

    def test_requires_a_secret_for_a_url(self, settings):
        settings.OUTBOX = {"CHECK_BACK": {"URL": "https://shop.example/check-back/"}}

        with pytest.raises(ConfigurationError, match=r'OUTBOX\["CHECK_BACK"\]\["SECRETS"\]'):
            make_asker("other")


class TestBrokersToAskFor:
    def test_are_those_that_do_not_ask_by_themselves(self, settings):
        settings.OUTBOX = {
            "BROKERS": {
                "tables": {"BACKEND": "outbox.embedded.EmbeddedBroker"},
                "quiet": {"BACKEND": "tests.outbox.check_backs.test_loop.Quiet"},
            }
        }

        assert brokers_to_ask_for({"tables", "quiet"}) == ["tables"]


class Quiet(MemoryBroker):
    lacks = (NeedsCheckLoop,)


class TestCheckLoop:
    @pytest.fixture
    def calls(self, monkeypatch):
        calls = []

        def check_halves(self, ask, *, limit):
            calls.append((self, ask(HALF), limit))
            return limit if len(calls) == 1 else 0

        monkeypatch.setattr(EmbeddedBroker, "check_halves", check_halves)
        monkeypatch.setattr(loop, "in_process", lambda alias: lambda half: COMMIT)
        return calls

    def test_asks_and_says_whether_more_is_due(self, calls):
        with closing(CheckLoop("default", "default")) as check_loop:
            assert check_loop.turn()
            assert not check_loop.turn()

        assert [call[1:] for call in calls] == [(COMMIT, LIMIT)] * 2
        assert calls[0][0] is calls[1][0]

    def test_makes_the_broker_again_after_trouble(self, calls, monkeypatch):
        check_loop = CheckLoop("default", "default")
        check_loop.turn()
        broker = calls[0][0]
        monkeypatch.setattr(broker, "check_halves", lambda *args, **options: (_ for _ in ()).throw(BrokerUnavailable("away")))
        with pytest.raises(BrokerUnavailable):
            check_loop.turn()

        check_loop.turn()

        assert calls[1][0] is not broker

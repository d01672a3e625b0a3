"""The brokers of a process: lent to one transaction each, kept, never shared with a child."""

from __future__ import annotations

import os

import pytest

from outbox.embedded import EmbeddedBroker
from outbox.half_first import producers as brokers
from outbox.half_first.producers import acquire, close_idle


@pytest.fixture
def closed(monkeypatch) -> list[EmbeddedBroker]:
    """The brokers that were closed."""
    found: list[EmbeddedBroker] = []
    close = EmbeddedBroker.close

    def close_and_tell(broker):
        found.append(broker)
        close(broker)

    monkeypatch.setattr(EmbeddedBroker, "close", close_and_tell)
    return found


class TestBorrow:
    def test_lends_a_broker_again_when_it_is_given_back(self):
        with acquire("default", "default") as first:
            pass
        with acquire("default", "default") as second:
            pass

        assert second is first

    def test_lends_a_broker_to_one_at_a_time(self):
        with acquire("default", "default") as first, acquire("default", "default") as second:
            assert second is not first

    def test_takes_a_broker_back_after_an_exception(self):
        with pytest.raises(LookupError), acquire("default", "default") as first:
            raise LookupError
        with acquire("default", "default") as second:
            assert second is first

    def test_makes_another_one_in_a_child(self, monkeypatch):
        with acquire("default", "default") as mine:
            pass
        monkeypatch.setattr(os, "getpid", lambda: 4711)
        with acquire("default", "default") as childs:
            pass
        close_idle()
        monkeypatch.undo()

        assert childs is not mine

    def test_makes_another_one_under_other_settings(self, settings, closed):
        with acquire("default", "default") as first, acquire("default", "default") as late:
            with acquire("default", "default") as idle:
                pass
            settings.OUTBOX = {**settings.OUTBOX}
            with acquire("default", "default") as second:
                pass

        assert second not in (first, late, idle)
        assert set(closed) == {first, late, idle}

    def test_listens_for_check_backs_where_the_broker_asks_its_producers(self, monkeypatch):
        heard = []
        monkeypatch.setattr(brokers, "listen_in_this_process", lambda alias, ask: heard.append(alias))

        with acquire("default", "default"):
            pass

        assert heard == ["default"]


class TestCloseIdle:
    def test_closes_what_nobody_uses(self, closed):
        with acquire("default", "default") as used:
            with acquire("default", "default") as idle:
                pass
            close_idle()

            assert closed == [idle]
        with acquire("default", "default") as again:
            assert again is used

"""The brokers of a process: lent to one transaction each, or shared by all; kept, never shared with a child."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox.embedded import EmbeddedBroker
from outbox.half_first import producers as brokers
from outbox.half_first.producers import acquire, close_idle
from tests.outbox.half_first.conftest import SharedBroker


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


class BothWays:
    """What holds for brokers that are lent one by one, and for one that all share."""

    def test_makes_another_one_in_a_child(self, monkeypatch):
        with acquire("default", "default") as mine:
            pass
        monkeypatch.setattr(os, "getpid", lambda: 4711)
        with acquire("default", "default") as childs:
            pass
        close_idle()
        monkeypatch.undo()

        assert childs is not mine


class TestBorrow(BothWays):
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
        monkeypatch.setattr(brokers, "listen_in_this_process", lambda *names: heard.append(names))

        with acquire("default", "default"):
            pass

        assert heard == [("default", "default")]


class TestSharing(BothWays):
    """A broker that says that it is thread-safe."""

    @pytest.fixture(autouse=True)
    def shared(self, use_memory):
        use_memory(kind=SharedBroker)

    @pytest.fixture
    def closed(self, monkeypatch) -> list[SharedBroker]:
        found: list[SharedBroker] = []
        monkeypatch.setattr(SharedBroker, "close", lambda broker: found.append(broker))
        return found

    def test_lends_one_broker_to_all_threads(self):
        together = threading.Barrier(4)

        def borrow(_: int) -> int:
            with acquire("default", "default") as broker:
                together.wait(10)  # all hold it now
                return id(broker)

        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(borrow, range(4)))) == 1

    def test_listens_each_time_since_it_may_have_failed_before(self, monkeypatch):
        heard = []
        monkeypatch.setattr(brokers, "listen_in_this_process", lambda *names: heard.append(names))

        for _ in range(2):
            with acquire("default", "default"):
                pass

        assert heard == [("default", "default")] * 2  # which does nothing the second time

    def test_makes_another_one_under_other_settings(self, settings, closed):
        with acquire("default", "default") as first:
            settings.OUTBOX = {**settings.OUTBOX}
            with acquire("default", "default") as second:
                assert second is not first
                assert closed == []  # somebody uses it

            assert closed == []
        assert closed == [first]

    def test_closes_what_nobody_uses(self, closed):
        with acquire("default", "default") as broker:
            close_idle()
            before = list(closed)
        close_idle()

        assert (before, closed) == ([], [broker])


class TestCloseIdle:
    def test_closes_what_nobody_uses(self, closed):
        with acquire("default", "default") as used:
            with acquire("default", "default") as idle:
                pass
            close_idle()

            assert closed == [idle]
        with acquire("default", "default") as again:
            assert again is used

import logging
import threading

import psycopg
import pytest
from django.db import connection

from outbox.database import loop_errors
from outbox.errors import BrokerUnavailable, LaneNotHeld, NotMigrated
from outbox.outages import Backoff
from outbox.relay import loops
from outbox.relay.loops import RepeatingThread
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(loops, "MAX_ERROR_SECONDS", 0.01)
    monkeypatch.setattr(loops, "BACKOFF", Backoff(loops.BACKOFF.base, loops.BACKOFF.limit, lambda: 0.01))


class Unreadable(Exception):
    """An error of another package whose text cannot be read."""

    def __str__(self):
        raise AttributeError("response")


class Work:
    """A step that returns or raises outcomes in order, then has nothing to do."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.turns = 0
        self.is_done = threading.Event()

    def __call__(self):
        self.turns += 1
        outcome = self.outcomes.pop(0) if self.outcomes else False
        if not self.outcomes:
            self.is_done.set()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture
def start():
    started = []

    def start(work, pause=60.0):
        started.append(RepeatingThread("The worker", work, pause=pause))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()
        one.join(10)
        assert not one.is_alive()


class TestRepeatingThread:
    def test_outlasts_an_error_whose_text_cannot_be_read(self, start, caplog):
        def step():
            with loop_errors.recording(loop_errors.Loop("check loop")):
                return work()

        work = Work(Unreadable(), True)

        start(step)

        assert work.is_done.wait(5)
        assert "(its __str__ raised AttributeError)" in caplog.text

    def test_goes_on_at_once_while_there_is_more_to_do(self, start):
        work = Work(True, True, False)

        start(work)

        assert work.is_done.wait(5)
        assert work.turns == 3

    def test_pauses_when_there_is_nothing_to_do(self, start):
        work = Work(False, False)

        start(work)

        assert not work.is_done.wait(0.2)

    @pytest.mark.parametrize(
        "trouble",
        [psycopg.OperationalError("gone"), psycopg.InterfaceError("closed"), BrokerUnavailable("away"), ValueError("a bug")],
        ids=lambda error: type(error).__name__,
    )
    def test_outlasts_trouble(self, trouble, start, caplog):
        work = Work(trouble, trouble, False)

        start(work)

        assert work.is_done.wait(5)
        assert str(trouble) in caplog.text

    def test_says_only_of_bugs_where_they_are(self, start, caplog):
        work = Work(psycopg.OperationalError("gone"), ValueError("a bug"), False)

        start(work)
        assert work.is_done.wait(5)

        assert [(record.levelno, bool(record.exc_info)) for record in caplog.records] == [
            *((logging.WARNING, False), (logging.ERROR, True)),
        ]

    def test_says_the_same_once_with_a_traceback(self, start, caplog):
        work = Work(*[ValueError("a bug")] * 5, ValueError("another"), False)

        start(work)
        assert work.is_done.wait(5)

        assert [(record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
            ("The worker fails: a bug", True),
            ("The worker fails: another", True),
        ]

    def test_does_not_try_again_at_once_what_was_refused(self, start, monkeypatch):
        monkeypatch.setattr(loops, "MAX_ERROR_SECONDS", 60.0)
        work = Work(ValueError("no permission"), False)

        start(work)

        assert not work.is_done.wait(0.5)
        assert work.turns == 1

    def test_waits_for_a_lane_and_says_so_once(self, start, caplog, monkeypatch):
        monkeypatch.setattr(loops, "LANES_HELD_SECONDS", 0.01)
        work = Work(LaneNotHeld("all held"), LaneNotHeld("all held"), False)

        start(work)

        assert work.is_done.wait(5)
        assert caplog.text.count("all held") == 1

    def test_looks_again_at_a_database_that_was_not_ready(self, start, caplog, monkeypatch):
        monkeypatch.setattr(loops, "NOT_MIGRATED_SECONDS", 0.01)
        work = Work(NotMigrated("no tables"), False)

        start(work)

        assert work.is_done.wait(5)
        assert "no tables" in caplog.text

    def test_ends_when_it_is_stopped_in_a_pause(self, start):
        work = Work(False)
        worker = start(work)
        wait_until(lambda: work.turns)

        worker.stop()

        worker.join(5)
        assert not worker.is_alive()

    def test_ends_when_it_is_stopped_in_a_back_off(self, start, monkeypatch):
        monkeypatch.setattr(loops, "NOT_MIGRATED_SECONDS", 60.0)
        work = Work(NotMigrated("no tables"))
        worker = start(work)
        wait_until(lambda: work.turns)

        worker.stop()

        worker.join(5)
        assert not worker.is_alive()


@pytest.mark.django_db(transaction=True)
def test_a_thread_leaves_no_connection_open(start):
    opened = []

    def query():
        connection.ensure_connection()
        opened.append(connection.connection)

    thread = start(query)
    wait_until(lambda: opened)
    thread.stop()
    thread.join(10)

    assert opened[0].closed

import logging
import os
import threading
from datetime import timedelta

import celery
import pytest
from django.db import transaction

from outbox import publish, publish_many
from outbox.message import Message
from outbox.publishing import wakeup
from outbox.publishing.wakeup import WakeupSender, wake_after_commit
from tests.waiting import wait_until

OUTBOX = {
    "BROKERS": {
        "default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"},
        "spare": {"BACKEND": "outbox.brokers.memory.MemoryBroker"},
    },
    "TOPICS": {"made": {}, "spared": {"BROKER": "spare"}},
    "CELERY_QUEUE": "wakeups",
}


class Nudging(Message):
    text: str = ""

    class Meta:
        topic = "made"


class Spared(Message):
    text: str = ""

    class Meta:
        topic = "spared"


@pytest.fixture(autouse=True)
def _topics(settings):
    settings.OUTBOX = OUTBOX


@pytest.fixture
def calls(monkeypatch):
    """The wakeups of committed transactions, instead of their sending."""
    seen = []
    monkeypatch.setattr(wakeup.sender, "add", seen.append)
    return seen


@pytest.fixture
def app(monkeypatch):
    """A Celery app whose tasks stay in memory: `app.sent()` takes what came, `app.fail` says that the broker is down."""
    app = Recorder("woken", broker="memory://", set_as_current=False)
    monkeypatch.setattr(celery, "current_app", app)
    monkeypatch.setattr(wakeup, "count_waiting", lambda connection, queue: 0)  # as if a worker took them
    monkeypatch.setattr(wakeup, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(wakeup, "BACKOFF_SECONDS", 0.0)
    return app


class Recorder(celery.Celery):
    """Counts what is sent, and through which thread."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []
        self.error = None
        self.came = threading.Semaphore(0)

    def send_task(self, name, **options):
        self.seen.append((name, options, threading.current_thread()))
        try:
            if self.error:
                raise self.error
            return super().send_task(name, **options)
        finally:
            self.came.release()


class TestTheWakeupOfATransaction:
    @pytest.mark.django_db(transaction=True)
    def test_comes_after_the_commit(self, calls):
        with transaction.atomic():
            publish(Nudging())
            assert calls == []

        assert calls == [("default", "default")]

    @pytest.mark.django_db(transaction=True)
    def test_does_not_come_after_a_rollback(self, calls):
        with transaction.atomic():
            publish(Nudging())
            transaction.set_rollback(True)

        assert calls == []

    @pytest.mark.django_db(transaction=True)
    def test_comes_once_for_each_broker(self, calls):
        with transaction.atomic():
            for _ in range(5):
                publish(Nudging())
                publish_many([Nudging(), Spared()])

        assert sorted(broker for _, broker in calls) == ["default", "spare"]

    @pytest.mark.django_db(transaction=True)
    def test_comes_although_the_first_savepoint_was_rolled_back(self, calls):
        with transaction.atomic():
            with transaction.atomic():
                publish(Nudging())
                transaction.set_rollback(True)
            publish(Nudging())

        assert calls == [("default", "default")]

    @pytest.mark.django_db
    def test_is_registered_once(self, django_capture_on_commit_callbacks):
        with django_capture_on_commit_callbacks() as callbacks:
            wake_after_commit("default", "a")
            wake_after_commit("default", "b")
            wake_after_commit("default", "a")

        assert len(callbacks) == 2

    @pytest.mark.django_db
    def test_is_not_registered_where_settings_say_so(self, settings, django_capture_on_commit_callbacks):
        settings.OUTBOX = {**OUTBOX, "CELERY_WAKEUP": False}

        with django_capture_on_commit_callbacks() as callbacks, transaction.atomic():
            publish(Nudging())

        assert callbacks == []

    @pytest.mark.django_db
    def test_waits_for_no_delayed_message(self, django_capture_on_commit_callbacks):
        with django_capture_on_commit_callbacks() as callbacks, transaction.atomic():
            publish(Nudging(), delay=timedelta(hours=1))

        assert callbacks == []

    @pytest.mark.django_db(transaction=True)
    def test_hurts_nobody_when_it_cannot_be_handed_over(self, monkeypatch, caplog):
        def fail(wakeup):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(wakeup.sender, "add", fail)
        done = []

        with transaction.atomic():
            publish(Nudging())
            transaction.on_commit(lambda: done.append("the next"))

        assert done == ["the next"]
        assert "can't start new thread" in caplog.text


class TestTheSender:
    def test_sends_the_relays_task_by_name(self, app):
        sender = WakeupSender()

        sender.add(("default", "spare"))
        assert app.came.acquire(timeout=10)

        ((name, options, _),) = app.seen
        assert name == "outbox.tasks.relay"
        assert options["kwargs"] == {"database": "default", "broker": "spare"}
        assert options["queue"] == "wakeups"
        assert options["retry"] is False
        assert options["expires"] > 0
        wait_until(lambda: (sender.sent, sender.failed) == (1, 0))

    def test_does_not_make_the_caller_wait(self, app):
        sender = WakeupSender()

        sender.add(("default", "default"))
        assert app.came.acquire(timeout=10)

        assert app.seen[0][2] is not threading.current_thread()
        assert app.seen[0][2].daemon

    def test_sends_a_burst_as_few(self, app, monkeypatch):
        def sent_to(broker):
            return [options for _, options, _ in app.seen if options["kwargs"]["broker"] == broker]

        monkeypatch.setattr(wakeup, "PAUSE_SECONDS", 0.2)
        sender = WakeupSender()

        for _ in range(1000):
            sender.add(("default", "default"))
        sender.add(("default", "last"))
        wait_until(lambda: sent_to("last") and sent_to("default"))  # those that wait together are sent in any order

        assert 1 <= len(sent_to("default")) <= 2

    def test_sends_what_came_in_the_pause_after_it(self, app, monkeypatch):
        monkeypatch.setattr(wakeup, "PAUSE_SECONDS", 0.1)
        sender = WakeupSender()
        sender.add(("default", "default"))
        assert app.came.acquire(timeout=10)

        sender.add(("default", "default"))

        assert app.came.acquire(timeout=10)
        assert len(app.seen) == 2

    def test_counts_failures_and_logs_when_they_begin_and_end(self, app, caplog):
        caplog.set_level(logging.INFO, "outbox.publishing.wakeup")
        sender = WakeupSender()
        app.error = OSError("the broker is down")
        for failed in (1, 2, 3):
            sender.add(("default", "default"))
            wait_until(lambda: sender.failed == failed)  # noqa: B023

        app.error = None
        sender.add(("default", "default"))
        wait_until(lambda: sender.sent == 1)

        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
        assert "the broker is down" in caplog.text
        assert "long-running relays are not affected" in caplog.text
        assert 'set OUTBOX["CELERY_WAKEUP"] = False' in caplog.text

    def test_logs_that_it_fails_again_after_a_success_within_a_minute(self, app, caplog, pass_in_log):
        caplog.set_level(logging.INFO, "outbox.publishing.wakeup")
        sender = WakeupSender()

        for error, seconds in ((True, 5), (False, 15), (True, 45), (True, 0)):
            before = sender.sent + sender.failed
            app.error = OSError("the broker is down") if error else None
            sender.add(("default", "default"))
            wait_until(lambda: sender.sent + sender.failed > before)  # noqa: B023
            pass_in_log(seconds)

        written = [record for record in caplog.records if record.name == "outbox.publishing.wakeup"]
        assert [record.levelname for record in written] == ["WARNING", "INFO", "WARNING"]
        assert written[-1].getMessage().endswith("(1 more time)")

    def test_begins_afresh_in_a_forked_process(self, app):
        wakeup.sender.add(("default", "default"))
        assert app.came.acquire(timeout=10)
        reader, writer = os.pipe()

        child = os.fork()
        if child == 0:
            app.came = threading.Semaphore(0)
            wakeup.sender.add(("default", "default"))
            os.write(writer, b"sent" if app.came.acquire(timeout=10) else b"lost")
            os._exit(0)
        os.waitpid(child, 0)

        assert os.read(reader, 4) == b"sent"

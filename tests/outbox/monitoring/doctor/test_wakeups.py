from contextlib import ExitStack

import celery
import pytest
from celery import _state
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging

from outbox import tasks
from outbox.monitoring.doctor import check_wakeups
from tests.waiting import wait_until


@pytest.fixture
def app(settings, monkeypatch):
    settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": True}
    app = celery.Celery("project", broker="memory://", set_as_current=False)
    monkeypatch.setattr(celery, "current_app", app)
    return app


def leave_alone(**options):
    """Keep a worker from setting up the logging of this process."""


@pytest.fixture
def workers(app, monkeypatch):
    """Start a worker of Celery that reads a queue, in a thread."""
    for state, name in ((_state, "default_app"), (_state._tls, "current_app")):  # a worker makes its app both
        monkeypatch.setattr(state, name, getattr(state, name))
    with ExitStack() as stack:
        setup_logging.connect(leave_alone)
        stack.callback(setup_logging.disconnect, leave_alone)
        yield lambda queue: stack.enter_context(start_worker(app, pool="solo", perform_ping_check=False, queues=[queue]))


class TestWakeups:
    def test_are_well_when_their_server_can_be_reached(self, app, about):
        ((level, text),) = about(check_wakeups, "wakeups")

        assert level == "ok"
        assert text.startswith("Celery's server memory://")

    def test_are_named_when_it_cannot(self, app, about):
        app.conf.broker_url = "amqp://127.0.0.1:1//"

        ((level, text),) = about(check_wakeups, "wakeups")

        assert level == "warning"
        assert text.startswith("Celery's server cannot be reached: ConnectionRefusedError")

    @pytest.mark.parametrize("queue", ["outbox", "another"])
    def test_are_named_when_no_worker_reads_their_queue(self, app, about, workers, queue):
        said = ("warning", "0 tasks in Celery's queue 'outbox', and no worker that answers takes from it")
        workers(queue)

        wait_until(lambda: (said in about(check_wakeups, "queue 'outbox'")) is (queue == "another"))

    def test_are_named_when_workers_do_not_know_their_task(self, app, about, workers):
        app.tasks.pop(tasks.relay.name)
        workers("outbox")

        said = "take from queue 'outbox' and discard outbox.tasks.relay, which they do not know"
        wait_until(
            lambda: [text for level, text in about(check_wakeups, "queue 'outbox'") if level == "warning" and said in text]
        )

    def test_are_not_looked_at_where_none_are_sent(self, app, about, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": False}

        assert about(check_wakeups, "wakeups") == []

from contextlib import ExitStack

import celery
import pytest
from celery import _state
from celery.contrib.testing.worker import start_worker

from outbox import tasks
from outbox.monitoring.doctor import Level, check_wakeups


@pytest.fixture
def app(settings, monkeypatch):
    settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": True}
    app = celery.Celery("project", broker="memory://", set_as_current=False)
    monkeypatch.setattr(celery, "current_app", app)
    return app


@pytest.fixture
def workers(app, monkeypatch):
    """Start a worker of Celery that reads a queue, in a thread."""
    monkeypatch.setattr(_state, "default_app", _state.default_app)  # a worker makes its app the default
    with ExitStack() as stack:
        yield lambda queue: stack.enter_context(start_worker(app, pool="solo", perform_ping_check=False, queues=[queue]))


class TestWakeups:
    def test_are_well_when_their_server_can_be_reached(self, app, about):
        ((level, text),) = about(check_wakeups, "wakeups")

        assert level is Level.OK
        assert text.startswith("Celery's server memory://")

    def test_are_named_when_it_cannot(self, app, about):
        app.conf.broker_url = "amqp://127.0.0.1:1//"

        ((level, text),) = about(check_wakeups, "wakeups")

        assert level is Level.WARNING
        assert text.startswith("Celery's server cannot be reached: ConnectionRefusedError")

    @pytest.mark.parametrize("queue", ["outbox", "another"])
    def test_are_named_when_no_worker_reads_their_queue(self, app, about, workers, queue):
        workers(queue)

        found = about(check_wakeups, "wakeups")

        said = (Level.WARNING, "0 tasks in Celery's queue 'outbox', and no worker that answers takes from it")
        assert (said in found) is (queue == "another")

    def test_are_named_when_workers_do_not_know_their_task(self, app, about, workers):
        app.tasks.pop(tasks.relay.name)
        workers("outbox")

        (_, (level, text)) = about(check_wakeups, "wakeups")

        assert level is Level.WARNING
        assert "take from queue 'outbox' and discard outbox.tasks.relay, which they do not know" in text

    def test_are_not_looked_at_where_none_are_sent(self, app, about, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": False}

        assert about(check_wakeups, "wakeups") == []

from datetime import timedelta

import celery
import pytest
from kombu import Queue

from outbox import consumer
from outbox.schedule import beat_schedule
from tests.outbox.checks.conftest import BROKERS


@pytest.fixture
def app(settings, monkeypatch):
    """The project's Celery app, which gets wakeups, with a complete beat."""
    settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {}}}
    app = celery.Celery("project", set_as_current=False)
    app.conf.beat_schedule = beat_schedule()
    monkeypatch.setattr(celery, "current_app", app)
    return app


class TestW030:
    def test_is_quiet_about_a_complete_beat(self, app, found):
        assert found() == []

    def test_warns_of_a_beat_without_the_sweep(self, app, found):
        app.conf.beat_schedule = {"mail": {"task": "mail", "schedule": timedelta(minutes=1)}}

        (problem,) = found()

        assert problem.id == "outbox.W030"
        assert "no entry for outbox.tasks.sweep" in problem.msg
        assert "beat_schedule()" in problem.hint
        assert '["CELERY_WAKEUP"] = False' in problem.hint

    def test_warns_of_two_queues(self, app, found, settings):
        settings.OUTBOX = {**settings.OUTBOX, "CELERY_QUEUE": "relays"}

        (problem,) = found()

        assert problem.id == "outbox.W030"
        assert problem.msg == "Celery's beat sends the sweep to the queue 'outbox', but wakeups go to 'relays'."
        assert "beat_schedule(queue='relays')" in problem.hint

    @pytest.mark.parametrize("outbox", [{"CELERY_WAKEUP": False}, {"TOPICS": {}}])
    def test_is_quiet_where_no_wakeup_is_sent(self, app, found, settings, outbox):
        app.conf.beat_schedule = {}
        settings.OUTBOX = {**settings.OUTBOX, **outbox}

        assert found() == []

    def test_is_quiet_where_the_project_has_no_celery_app(self, app, found, monkeypatch):
        monkeypatch.setattr(celery, "current_app", celery.Celery("default", set_as_current=False))

        assert found() == []

    def test_is_quiet_where_entries_are_kept_in_a_database(self, app, found):
        app.conf.beat_schedule = {}
        app.conf.beat_scheduler = "django_celery_beat.schedulers:DatabaseScheduler"

        assert found() == []


class TestW031:
    def test_warns_of_wakeups_where_tasks_run_eagerly(self, app, found):
        app.conf.task_always_eager = True

        (problem,) = found()

        assert problem.id == "outbox.W031"
        assert "task_always_eager" in problem.msg
        assert '["CELERY_WAKEUP"] = False' in problem.hint


class TestW071:
    def test_warns_of_a_queue_that_celery_does_not_create(self, app, found):
        app.conf.update(task_create_missing_queues=False, task_queues=[Queue("celery")])

        (problem,) = found()

        assert problem.id == "outbox.W071"
        assert problem.msg.startswith("Celery's task_queues have no queue 'outbox'")
        assert "kombu.Queue('outbox')" in problem.hint

    @pytest.mark.parametrize("options", [{"task_create_missing_queues": True}, {"task_queues": [Queue("outbox")]}])
    def test_is_quiet_about_a_queue_that_is_there_or_is_made(self, app, found, options):
        app.conf.update(**{"task_create_missing_queues": False, "task_queues": [Queue("celery")], **options})

        assert found() == []


class TestE058:
    def test_finds_a_group_without_a_consumer(self, app, found):
        app.conf.beat_schedule = beat_schedule(consume=["pionts", "points"])
        consumer(topic="orders", group="points")(lambda message, context: None)

        (problem,) = found()

        assert problem.id == "outbox.E058"
        assert problem.msg == "Celery's beat consumes for the group 'pionts', which has no @consumer."
        assert problem.hint == "Choices are: points."

    def test_says_where_handlers_are_found_if_there_are_none(self, app, found):
        app.conf.beat_schedule = beat_schedule(consume=["points"])

        (problem,) = found()

        assert "into consumers.py of an app in INSTALLED_APPS" in problem.hint

"""The Celery tasks, called as functions. A worker runs them in tests/journeys/."""

import threading
from contextlib import ExitStack
from datetime import timedelta

import psycopg
import pytest
from celery import current_app
from django.db import connections

from outbox import atomic, database, publish_raw, shutdown, tasks
from outbox.embedded.models import EmbeddedHalf, EmbeddedMessage
from outbox.errors import ConfigurationError
from outbox.models import Batch, CheckBack, Deferred, MessageState, Process, State
from outbox.relay import hosts
from outbox.relay.lane import take_lane
from outbox.testing.factories import DeferredFactory, InboxFactory
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _no_wakeup_and_one_database(settings):
    settings.OUTBOX = {**settings.OUTBOX, "CELERY_WAKEUP": False}
    settings.DATABASE_ROUTERS = ["tests.outbox.test_tasks.OnlyDefault"]
    yield
    with database.connect("default") as own:
        own.execute("DELETE FROM outbox_wakeup")


class OnlyDefault:
    def allow_migrate(self, db, app_label, **hints):
        return db == "default"


@pytest.fixture
def connect():
    with ExitStack() as stack:
        yield lambda: stack.enter_context(database.connect("default"))


def publish(count=1):
    ids = []
    for _ in range(count):
        with atomic():
            ids.append(publish_raw("orders", {}).message_id)
    return ids


def sent():
    return MessageState.objects.filter(state="sent").count()


class TestRelay:
    def test_is_called_as_the_wakeup_calls_it(self):
        assert "outbox.tasks.relay" in current_app.tasks
        publish()

        current_app.tasks["outbox.tasks.relay"](database="default", broker="default")

        assert sent() == 1

    def test_goes_on_in_a_process_with_a_handler_that_was_given_up(self, monkeypatch):
        monkeypatch.setattr(shutdown, "_given_up", {1})
        publish(3)

        tasks.relay()

        assert sent() == 3

    def test_has_nothing_to_do_when_others_hold_all_lanes(self, settings, connect):
        settings.OUTBOX = {**settings.OUTBOX, "RELAY": {"LANES": 1}}
        take_lane(connect(), lanes=1)
        publish()

        tasks.relay()
        tasks.sweep()

        assert sent() == 0
        assert sorted(Process.objects.values_list("kind", "note")) == [("sweep", "celery"), ("wakeup", "celery")]

    def test_leaves_nothing_behind(self, connect):
        tasks.relay()

        left = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox %' AND datname = current_database()"
        own = connect()
        wait_until(lambda: own.execute(left).fetchone() == (0,))  # the server ends a session after its client has left
        assert take_lane(own, lanes=16) == 1

    def test_fails_for_a_broker_that_is_not_in_settings(self):
        with pytest.raises(ConfigurationError, match="gone"):
            tasks.relay("default", "gone")

    def test_logs_a_database_that_is_away(self, monkeypatch, caplog):
        with monkeypatch.context() as patched:
            patched.setitem(connections["default"].settings_dict, "PORT", 1)
            tasks.relay()

        assert "run_once failed for now: connection" in caplog.text


class TestSweep:
    def test_relays_what_no_wakeup_reported(self):
        publish(3)

        tasks.sweep()

        assert sent() == 3

    def test_shows_that_beat_runs(self):
        tasks.sweep()
        tasks.relay()

        assert sorted(Process.objects.values_list("kind", "note")) == [("relay", "celery"), ("sweep", "celery")]

    def test_does_no_harm_side_by_side(self):
        publish(200)
        sweeps = [threading.Thread(target=tasks.sweep) for _ in range(3)]

        for sweep in sweeps:
            sweep.start()
        for sweep in sweeps:
            sweep.join()

        assert (sent(), EmbeddedMessage.objects.count()) == (200, 200)
        assert not Batch.objects.exclude(state=State.SENT, attempt=1).exists()
        assert not EmbeddedHalf.objects.exists()

    def test_asks_about_half_messages_for_the_embedded_broker(self, settings, monkeypatch):
        brokers = settings.OUTBOX["BROKERS"]
        options = {**brokers["default"]["OPTIONS"], "CHECK_AFTER": timedelta(milliseconds=1)}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {"default": {**brokers["default"], "OPTIONS": options}}}
        publish()
        monkeypatch.setattr("outbox.relay.commit.Committer.commit", lambda self, decided: [])
        hosts.run_once(
            hosts.RelayTarget("default", "default"),
            note="test",
            at_most=timedelta(seconds=30),
            idle_timeout=hosts.NO_IDLE_TIMEOUT,
        )
        assert EmbeddedMessage.objects.count() == 0

        tasks.sweep()

        assert EmbeddedMessage.objects.count() == 1
        assert CheckBack.objects.get().answer == "COMMIT"

    def test_goes_on_with_the_next_post_when_one_fails(self, monkeypatch, caplog):
        publish()
        visit = hosts.run_once

        def visit_with_trouble(post, **options):
            if post.database == "default" and not caplog.records:
                raise psycopg.OperationalError("gone for a moment")
            return visit(post, **options)

        monkeypatch.setattr(hosts, "run_once", visit_with_trouble)
        monkeypatch.setattr(hosts, "relay_targets", lambda: [hosts.RelayTarget("default", "default")] * 2)

        tasks.sweep()

        assert sent() == 1


class TestMaintenance:
    def test_keeps_each_database_and_broker_in_shape(self, monkeypatch):
        kept, pruned = [], []
        monkeypatch.setattr(tasks, "maintain", kept.append)
        monkeypatch.setattr(tasks, "prune_brokers", pruned.append)

        tasks.maintenance()

        assert (kept, pruned) == (["default"], [{"default"}])

    def test_goes_on_with_the_brokers_after_an_error_of_a_database(self, monkeypatch, caplog):
        def refuse(using):
            raise psycopg.errors.InsufficientPrivilege("must be owner of table outbox_message")

        pruned = []
        monkeypatch.setattr(tasks, "maintain", refuse)
        monkeypatch.setattr(tasks, "prune_brokers", pruned.append)

        tasks.maintenance()

        assert pruned == [{"default"}]
        assert "must be owner of table outbox_message" in caplog.text

    def test_tidies_deferred_messages(self):
        row = DeferredFactory(dead=True)
        InboxFactory(message_id=row.message_id)

        tasks.maintenance()

        assert not Deferred.objects.exists()

    def test_runs_over_the_real_tables(self, caplog):
        tasks.maintenance()

        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []

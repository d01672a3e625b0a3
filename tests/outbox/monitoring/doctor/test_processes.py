from datetime import date
from importlib import import_module

import celery
import pytest
from django.db import connections

from outbox import consumer, database
from outbox.database import heartbeats
from outbox.monitoring.doctor import check_processes
from outbox.schedule import beat_schedule

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

RELAY = "relay of database 'default', broker 'default'"
CONSUMER = "consumer of group 'cart', broker 'default'"


@pytest.fixture(autouse=True)
def _group(monkeypatch):
    monkeypatch.setattr(import_module("outbox.consuming.register"), "registered", {})
    consumer(topic="orders", group="cart")(lambda message, context: None)


class TestProcesses:
    @pytest.mark.parametrize(
        ("subject", "beat"),
        [
            (RELAY, {"kind": "relay", "broker": "default"}),
            (CONSUMER, {"kind": "consumer", "broker": "default", "consumer_group": "cart"}),
        ],
    )
    def test_are_well_when_they_send_heartbeats(self, about, subject, beat):
        heartbeats.beat(database.raw("default"), **beat)

        assert about(check_processes, subject) == [("ok", "sends heartbeats")]

    @pytest.mark.parametrize(
        ("subject", "beat", "named"),
        [
            (RELAY, {"kind": "relay", "broker": "default"}, "broker 'default' of database 'default'"),
            (CONSUMER, {"kind": "consumer", "broker": "default", "consumer_group": "cart"}, "group 'cart' of database 'default'"),
        ],
    )
    def test_are_not_well_when_their_heartbeats_say_that_they_fail(self, about, subject, beat, named):
        heartbeats.beat(database.raw("default"), **beat, errors={beat["kind"]: "permission denied for table outbox_ticket"})

        assert about(check_processes, subject) == []
        [(level, text)] = about(check_processes, named)
        assert level == "warning"
        assert text.endswith("fails. permission denied for table outbox_ticket.")

    def test_are_not_all_that_needs_attention(self, about, monkeypatch):
        monkeypatch.setattr("outbox.monitoring.status.overdue", lambda days: [date(2001, 2, 3)])

        [(level, text)] = about(check_processes, "database 'default'")

        assert level == "warning"
        assert text.startswith("Messages of 1 day are kept past their retention, from 2001-02-03 on.")

    @pytest.mark.parametrize(
        ("subject", "text"),
        [
            ("broker 'default' of database 'default'", "No relay is running."),
            ("group 'cart'", "No consumer is running for broker 'default'."),
        ],
    )
    def test_are_missed_when_they_send_none(self, about, subject, text):
        heartbeats.beat(database.raw("default"), "relay", broker="another")
        heartbeats.beat(database.raw("other"), "relay", broker="default")
        heartbeats.beat(database.raw("default"), "consumer", broker="default", consumer_group="points")

        assert ("warning", text) in about(check_processes, subject)

    def test_are_missed_when_their_last_heartbeat_is_old(self, about):
        own = database.raw("default")
        heartbeats.beat(own, "relay", broker="default")
        own.execute("UPDATE outbox_process SET beat_at = beat_at - interval '9 s'")

        assert about(check_processes, RELAY) == []

    def test_are_not_missed_when_celery_consumes(self, about, monkeypatch):
        app = celery.Celery("project", set_as_current=False)
        app.conf.beat_schedule = beat_schedule(consume=["cart"])
        monkeypatch.setattr(celery, "current_app", app)

        assert about(check_processes, CONSUMER) == []

    def test_are_not_asked_for_where_the_database_is_away(self, about, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setitem(connections["default"].settings_dict, "HOST", "127.0.0.1")
            patch.setitem(connections["default"].settings_dict, "PORT", 1)
            found = about(check_processes, RELAY)

        assert found == []

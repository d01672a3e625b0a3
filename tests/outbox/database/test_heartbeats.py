import os

import pytest

from outbox import database
from outbox.database import heartbeats
from outbox.models import Process

pytestmark = pytest.mark.django_db


@pytest.fixture
def connection(db):
    return database.raw("default")


class TestBeat:
    def test_says_who_lives(self, connection):
        heartbeats.beat(connection, "relay", broker="default", lane=3, note="long-running")

        row = Process.objects.get()
        assert (row.kind, row.pid, row.broker, row.lane, row.breaker, row.note) == (
            *("relay", os.getpid(), "default", 3, "closed", "long-running"),
        )

    def test_keeps_one_row_and_its_start(self, connection):
        heartbeats.beat(connection, "relay", broker="default", lane=3)
        first = Process.objects.get()

        heartbeats.beat(connection, "relay", broker="default", lane=4, breaker="open")

        row = Process.objects.get()
        assert (row.lane, row.breaker, row.started_at) == (4, "open", first.started_at)
        assert row.beat_at > first.beat_at

    def test_keeps_apart_what_a_process_does(self, connection):
        heartbeats.beat(connection, "relay", broker="default")
        heartbeats.beat(connection, "consumer", broker="default", consumer_group="cart")
        heartbeats.beat(connection, "relay", broker="other")

        assert Process.objects.count() == 3

    def test_stores_errors_that_postgresql_cannot_hold_as_they_are(self, connection):
        heartbeats.beat(connection, "relay", errors={"check loop": "a\x00b\ud800"}, refusals={"orders": "\x00"})

        row = Process.objects.get()
        assert (row.errors, row.refusals) == ({"check loop": "a\\x00b\\ud800"}, {"orders": "\\x00"})


class TestLeave:
    def test_takes_its_own_row_away(self, connection):
        heartbeats.beat(connection, "relay", broker="default")
        heartbeats.beat(connection, "relay", broker="other")

        heartbeats.delete_heartbeat(connection, "relay", broker="default")

        assert [row.broker for row in Process.objects.all()] == ["other"]


class TestForgetStale:
    def test_deletes_those_that_have_been_silent(self, connection):
        heartbeats.beat(connection, "relay", broker="silent")
        connection.execute("UPDATE outbox_process SET beat_at = beat_at - interval '6 minutes'")
        heartbeats.beat(connection, "relay", broker="living")

        assert heartbeats.forget_stale(connection) == 1

        assert [row.broker for row in Process.objects.all()] == ["living"]

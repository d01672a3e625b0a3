"""A relay dies after its commit, and none runs for longer than the retention: its messages are not published again."""

from contextlib import closing
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group

from outbox import atomic, consumer, database, publish
from outbox.consuming import register
from outbox.consuming.worker import Worker
from outbox.models import Batch, Inbox, State
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget, run_once
from outbox.relay.maintenance import prune, prune_brokers
from outbox.testing.crash import crash
from tests.outbox.publishing.rows import OrderMade

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

# Longer than the retention of messages, topics and inbox rows.
PASS_TIME = """
UPDATE outbox_embedded_message SET stored_at = stored_at - interval '8 days';
UPDATE outbox_batch SET claimed_at = claimed_at - interval '8 days', decided_at = decided_at - interval '8 days';
UPDATE outbox_inbox SET handled_at = handled_at - interval '8 days'
"""


@pytest.fixture(autouse=True)
def _points(settings, monkeypatch):
    settings.OUTBOX = {
        "BROKERS": {"default": {}},
        "TOPICS": {"made": {"TYPE": "transaction"}},
        "RELAY": {"SWEEP_AGE": timedelta(milliseconds=1)},
        "CELERY_WAKEUP": False,
    }
    monkeypatch.setattr(register, "registered", {})

    @consumer(OrderMade, group="points")
    def give(message, context):
        Group.objects.create(name=f"points for {message.order_id}, delivery {Group.objects.count() + 1}")

    yield
    with database.connect("default") as own:
        own.execute("TRUNCATE outbox_embedded_message, outbox_embedded_half, outbox_embedded_offset, outbox_embedded_delivery")


def relay():
    run_once(RelayTarget("default", "default"), note="test", at_most=timedelta(seconds=10), idle_timeout=NO_IDLE_TIMEOUT)


def consume():
    with closing(Worker(register.group("points"), "default")) as worker:
        while worker.step(timedelta(0)):
            pass


def pass_time_and_prune():
    with database.connect("default") as own:
        own.execute(PASS_TIME)
    prune("default")
    prune_brokers(["default"])


class TestACommitThatWasNotConfirmed:
    def test_is_published_and_applied_once_after_any_time(self):
        with atomic():
            for number in range(10):
                publish(OrderMade(order_id=number))
        with crash("relay.after_commit"):
            relay()
        consume()

        pass_time_and_prune()
        Inbox.objects.all().delete()  # what the prune keeps for an unfinished batch: it cannot drop a copy
        relay()
        consume()

        assert not Inbox.objects.exists()  # no copy came
        assert [batch.state for batch in Batch.objects.all()] == [State.SENT]
        assert Group.objects.count() == 10

    def test_holds_retention_up_no_longer_than_it_is_open(self):
        with atomic():
            publish(OrderMade(order_id=1))
        with crash("relay.after_commit"):
            relay()
        consume()
        pass_time_and_prune()

        relay()

        assert prune_brokers(["default"]) == {"default": 1}

"""Reused ids of half messages, after a restore of the broker's database, or when a topic moves to another broker."""

import uuid
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from outbox import atomic, conf, database, publish
from outbox.brokers.base import Outgoing
from outbox.brokers.capabilities import HalfMessages
from outbox.models import Batch, State
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget, run_once
from outbox.testing.crash import crash
from tests.outbox.publishing.rows import OrderMade
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

MOMENT = timedelta(milliseconds=1)

EMPTY = """
TRUNCATE outbox_embedded_message, outbox_embedded_half, outbox_embedded_queue, outbox_embedded_offset, outbox_embedded_delivery;
ALTER SEQUENCE outbox_embedded_half_id RESTART
"""


def configure(settings, broker):
    settings.OUTBOX = {
        "BROKERS": {"default": {}, "second": {"OPTIONS": {"DATABASE": "other"}}},
        "TOPICS": {"made": {"TYPE": "transaction", "BROKER": broker}},
        "RELAY": {"SWEEP_AGE": MOMENT},
        "CELERY_WAKEUP": False,
    }


def restore(alias):
    """Empty the broker's tables in a database, and restart its ids."""
    with database.connect(alias) as own:
        own.execute(EMPTY)


@pytest.fixture(autouse=True)
def _new_brokers(settings, monkeypatch):
    monkeypatch.setattr("outbox.relay.rounds.RETRY_BASE", MOMENT)
    configure(settings, "default")
    for alias in ("default", "other"):
        restore(alias)
    yield
    for alias in ("default", "other"):
        restore(alias)


def relay(broker):
    run_once(RelayTarget("default", broker), note="test", at_most=timedelta(seconds=10), idle_timeout=NO_IDLE_TIMEOUT)


@pytest.fixture
def decided() -> list[str]:
    """Publish messages whose relay dies after its decision; return their ids."""
    with atomic():
        published = [str(publish(OrderMade(order_id=number)).message_id) for number in range(8)]
    with crash("after_decide"):
        relay("default")
    Batch.objects.update(decided_at=datetime.now(UTC) - timedelta(hours=1))  # long enough for every sweep
    return published


def half_ids():
    return [half for batch in Batch.objects.filter(state=State.PREPARED).order_by("id") for half in batch.half_ids]


def store_undecided(broker, count):
    """Store half messages of transactions that are rolled back; return their ids."""
    ghosts = [Outgoing(str(uuid.uuid4()), "made", b"a ghost", token=f"elsewhere:1:1:{n}") for n in range(1, count + 1)]
    with closing(conf.make_broker(broker)) as own:
        return [result.half_id for result in HalfMessages.of(own).send_halves(ghosts)]


def visible(alias):
    with database.connect(alias) as own:
        rows = own.execute("SELECT message_id FROM outbox_embedded_message ORDER BY stored_at, topic_id, queue, pos")
        return [message_id for (message_id,) in rows]


def relay_until(broker, is_done: Callable[[], bool]):
    def is_done_now() -> bool:
        relay(broker)
        return is_done()

    wait_until(is_done_now)


class TestARestoreOfTheBrokersDatabase:
    def test_makes_no_ghost_and_loses_nothing(self, decided):
        numbers = half_ids()

        restore("default")
        ghosts = store_undecided("default", len(numbers))
        relay_until("default", lambda: not Batch.objects.exclude(state=State.SENT).exists())

        assert ghosts == numbers
        assert sorted(visible("default")) == sorted(decided)


class TestATopicThatMovesToAnotherBroker:
    def test_makes_no_ghost_and_loses_nothing(self, decided, settings):
        numbers = half_ids()

        configure(settings, "second")
        ghosts = store_undecided("second", len(numbers))
        relay_until("second", lambda: not Batch.objects.exclude(state=State.SENT).exists())

        assert ghosts == numbers
        assert sorted(visible("other")) == sorted(decided)
        assert visible("default") == []

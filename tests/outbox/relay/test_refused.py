"""A database that refuses what the relay does: a publication without replica identities, a missing permission."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from outbox import atomic, database, publish_raw
from outbox.brokers.base import ACCEPTED, Limits
from outbox.brokers.memory import MemoryBroker
from outbox.models import Batch, Process, State
from outbox.monitoring.attention import read_attention
from outbox.relay.hosts import RelayTarget
from outbox.relay.loops import RelayThread
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

# Tables that a publication of all tables covers, and whose rows could then be neither deleted nor updated.
WITHOUT_IDENTITY = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = current_schema() AND c.relkind = 'r' AND c.relpersistence = 'p' AND c.relreplident <> 'f'
  AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
"""


@pytest.fixture
def publication(own: database.Connection) -> Iterator[None]:
    """Publish all tables, as Debezium and logical replicas do."""
    own.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    yield
    own.execute("DROP PUBLICATION everything")


@pytest.fixture
def relay(own: database.Connection, memory_brokers: None) -> Iterator[Callable[[], RelayThread]]:
    started: list[RelayThread] = []

    def start() -> RelayThread:
        started.append(RelayThread(RelayTarget("default", "default")))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()
        one.join(10)


def publish() -> None:
    with atomic():
        publish_raw("orders", {"n": 1})


def sent() -> bool:
    return Batch.objects.filter(state=State.SENT).exists()


def fails() -> list[str]:
    with database.connect("default") as connection:
        return [one.line for one in read_attention(connection, "default") if one.id == "outbox.process_fails"]


class TestASendThatTakesLong:
    def test_does_not_silence_its_relay(self, relay, monkeypatch):
        has_begun, may_end = threading.Event(), threading.Event()

        def send(broker, messages):
            has_begun.set()
            may_end.wait(60)
            return [ACCEPTED] * len(messages)

        monkeypatch.setattr(MemoryBroker, "send", send)
        monkeypatch.setattr(MemoryBroker, "limits", staticmethod(lambda options, topic: Limits(send=timedelta(seconds=30))))
        publish()
        relay()
        assert has_begun.wait(30)
        began = Process.objects.get(kind="relay")

        wait_until(lambda: Process.objects.get(kind="relay").beat_at > began.beat_at + timedelta(seconds=3))
        row = Process.objects.get(kind="relay")
        may_end.set()

        assert (row.lane, row.breaker) == (began.lane, "closed")
        assert wait_until(sent)


class TestPublicationOfAllTables:
    def test_finds_a_replica_identity_on_each(self, own):
        assert own.execute(WITHOUT_IDENTITY).fetchall() == []

    def test_does_not_stop_the_relay(self, publication, relay):
        publish()

        relay()

        assert wait_until(sent)


class TestErrorThatStays:
    def test_is_named_with_its_words_until_it_is_corrected(self, own, publication, relay):
        own.execute("ALTER TABLE outbox_ticket REPLICA IDENTITY NOTHING")
        try:
            publish()
            one = relay()

            named = wait_until(fails)
            failures = wait_until(lambda: one._failures > 3 and one._failures)
        finally:
            own.execute("ALTER TABLE outbox_ticket REPLICA IDENTITY FULL")

        assert "Broker 'default': (outbox.process_fails) The relay of process " in named[0]
        assert 'cannot delete from table "outbox_ticket" because it does not have a replica identity' in named[0]
        assert failures > 3
        assert wait_until(sent)
        assert wait_until(lambda: not fails())
        assert Process.objects.get(kind="relay").errors == {}

"""The number of statements for a lone message, which is most of its cost."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from outbox import atomic, database, publish_raw
from outbox.batches.claim import CLAIM_TOPIC, ORDERED_WAITS
from outbox.batches.steps import DECIDE, MARK_SENT
from outbox.models import MessageState
from outbox.relay import hosts
from outbox.relay.hosts import RelayTarget
from outbox.relay.wakeup import ANNOUNCE, FORGET_DEAD
from tests.waiting import wait_until

MEMORY = {"default": {"BACKEND": "outbox.brokers.memory.MemoryBroker"}}  # it asks PostgreSQL nothing
ONE_PHASE = [CLAIM_TOPIC, MARK_SENT]
TWO_PHASE = [CLAIM_TOPIC, DECIDE, MARK_SENT]


@contextmanager
def on_call(
    monkeypatch: pytest.MonkeyPatch, own: database.Connection, *, maintenance_seconds: float = 3600.0
) -> Iterator[list[str]]:
    """Run a relay that waits for publishers, by default without its maintenance; yield the statements that it sends."""
    sent: list[str] = []
    execute = psycopg.Cursor.execute

    def noted(cursor: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == "counted":
            sent.append(query)
        return execute(cursor, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", noted)
    monkeypatch.setattr(hosts, "MAINTENANCE_SECONDS", maintenance_seconds)
    with hosts.open_runner(RelayTarget("default", "default"), note="test") as runner:
        thread = threading.Thread(target=runner.run, name="counted")
        thread.start()
        wait_until(lambda: own.execute("SELECT FROM outbox_wakeup").fetchone() is not None)
        wait_until(lambda: {ORDERED_WAITS, ANNOUNCE} <= set(sent) and sent[-1] in (ORDERED_WAITS, ANNOUNCE))
        yield sent
        runner.stop()
        thread.join(20)


def send_alone() -> None:
    with atomic():
        receipt = publish_raw("alone", {})
    wait_until(lambda: MessageState.objects.get(id=receipt.message_id).state == "sent")


@pytest.mark.django_db(transaction=True)
class TestALoneMessage:
    @pytest.fixture(autouse=True)
    def _long_waits(self, monkeypatch):
        monkeypatch.setattr(hosts, "IDLE_WAITS", {"shortest": timedelta(seconds=3), "longest": timedelta(seconds=3)})

    @pytest.mark.parametrize(("kind", "statements"), [("normal", ONE_PHASE), ("transaction", TWO_PHASE)])
    def test_costs_a_relay_few_statements(self, monkeypatch, settings, own, kind, statements):
        settings.OUTBOX = {"BROKERS": MEMORY, "TOPICS": {"alone": {"TYPE": kind}}}
        with on_call(monkeypatch, own) as sent:
            send_alone()  # the first one connects
            sent.clear()
            for _ in range(3):
                send_alone()

            assert sent == statements * 3

    def test_does_not_wait_for_the_maintenance_that_is_due(self, monkeypatch, settings, own):
        settings.OUTBOX = {"BROKERS": MEMORY, "TOPICS": {"alone": {"TYPE": "normal"}}}
        with on_call(monkeypatch, own, maintenance_seconds=0.0) as sent:
            send_alone()
            wait_until(lambda: FORGET_DEAD in sent[sent.index(MARK_SENT) :] and sent[-1] == ORDERED_WAITS)
            sent.clear()
            send_alone()
            wait_until(lambda: FORGET_DEAD in sent)

            assert sent[:2] == ONE_PHASE

    def test_wakes_one_relay_of_several(self, monkeypatch, settings, own):
        settings.OUTBOX = {"BROKERS": MEMORY, "TOPICS": {"alone": {"TYPE": "normal"}}}
        with hosts.open_runner(RelayTarget("default", "default"), note="test") as first:
            thread = threading.Thread(target=first.run)
            thread.start()
            wait_until(lambda: own.execute("SELECT FROM outbox_wakeup").fetchone() is not None)
            with on_call(monkeypatch, own) as sent:
                sent.clear()
                send_alone()

                assert CLAIM_TOPIC not in sent
            first.stop()
            thread.join(20)

"""
A storm over relays and the embedded broker: leases that end at once, connections that are cut, answers that are lost.

Chance decides what goes wrong; that each committed message is shown once, and in the order of its key, it does not.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections, transaction

from outbox import database, publish_raw, topics
from outbox.brokers.base import SendResult, SendStatus
from outbox.check_backs.loop import CheckLoop
from outbox.embedded import EmbeddedBroker
from outbox.outages import Backoff
from outbox.relay import loops
from outbox.relay.hosts import RelayTarget
from outbox.relay.loops import RelayThread, RepeatingThread
from tests.journeys.tables import tables
from tests.waiting import wait_until

SECONDS = 3
SHARE_LOST = 0.1
KEYS = ["a", "b", "c"]
TOPICS = ["orders", "orders", "steps", "steps", "notes"]

SOON = timedelta(milliseconds=10)

OUTBOX = {
    "BROKERS": {
        "default": {
            "BACKEND": "tests.journeys.test_storm.RoughBroker",
            "OPTIONS": {"CHECK_AFTER": SOON, "CHECK_INTERVAL": SOON, "CHECK_LIMIT": 1000},
        }
    },
    "TOPICS": {"orders": {"TYPE": "transaction"}, "steps": {"TYPE": "fifo"}, "notes": {"TYPE": "normal"}},
    "RELAY": {"BATCH_SIZE": 20, "LEASE": SOON * 20, "SWEEP_AGE": SOON},
    "CELERY_WAKEUP": False,
}

# Written in the transaction that publishes, behind the publish.
BOOKS = """
CREATE TABLE storm_published (id text, topic text, key text, number bigserial);
CREATE TABLE storm_key (topic text, key text, PRIMARY KEY (topic, key))
"""

# Held until the commit, so that the numbers of a key are in the order of the commits.
LOCK = "INSERT INTO storm_key VALUES (%s, %s) ON CONFLICT (topic, key) DO UPDATE SET key = excluded.key"

CUT_ONE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'outbox %' ORDER BY random() LIMIT 1
"""

COUNT_OPEN = """
SELECT (SELECT count(*) FROM outbox_ticket) + (SELECT count(*) FROM outbox_batch WHERE state IN (0, 1, 2))
     + (SELECT count(*) FROM outbox_embedded_half WHERE state IN (0, 1))
"""

SHOWN = """
SELECT t.name, m.key, m.message_id, (m.headers::json ->> 'ce-lane')::int, (m.headers::json ->> 'ce-number')::int
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id ORDER BY m.queue, m.pos
"""


class RoughBroker(EmbeddedBroker):
    """Loses requests and answers of some messages while the storm lasts; the relay is told that it is unsure."""

    is_storm = threading.Event()

    def send(self, messages):
        return self._lose_some(super().send, messages)

    def send_halves(self, messages):
        return self._lose_some(super().send_halves, messages)

    def end(self, refs, resolution, *, within=None):
        return self._lose_some(partial(super().end, resolution=resolution, within=within), refs)

    def _lose_some(self, call: Callable[[Sequence[object]], list[SendResult]], handed: Sequence[object]) -> list[SendResult]:
        share = SHARE_LOST if self.is_storm.is_set() else 0
        arriving = [one for one in handed if random.random() >= share]
        outcomes = dict(zip(map(id, arriving), call(arriving) if arriving else [], strict=True))
        for one in arriving:
            if random.random() < share:
                del outcomes[id(one)]
        return [outcomes.get(id(one), SendResult(SendStatus.UNSURE, reason=f"lost: {random.random()}")) for one in handed]


class Wreck(Exception):
    """Rolls a publisher back."""


@pytest.fixture
def storm(transactional_db: None, settings, monkeypatch) -> Iterator[threading.Event]:
    settings.OUTBOX = OUTBOX
    monkeypatch.setattr(loops, "BACKOFF", Backoff(SOON, SOON))
    topics.forget("default")
    with tables(BOOKS):
        RoughBroker.is_storm.set()
        yield RoughBroker.is_storm
        RoughBroker.is_storm.clear()
        topics.forget("default")


@pytest.fixture
def threads(storm: threading.Event) -> Iterator[list[RepeatingThread]]:
    """Three relays and two check loops, each with connections of its own."""
    loops = [CheckLoop("default", "default") for _ in range(2)]
    started: list[RepeatingThread] = [RelayThread(RelayTarget("default", "default")) for _ in range(3)]
    started += [RepeatingThread("checks", loop.turn, pause=0.02) for loop in loops]
    for one in started:
        one.start()
    yield started
    for one in started:
        one.stop()
    for one in started:
        one.join(20)
        assert not one.is_alive()
    for loop in loops:
        loop.close()


def publish_until_calm(storm: threading.Event) -> None:
    """Commit some, roll back some, and some savepoints only."""
    while storm.is_set():
        with suppress(Wreck, DatabaseError), transaction.atomic():
            for _ in range(random.randint(1, 4)):
                with suppress(Wreck), transaction.atomic():
                    _publish_one()
                    if random.random() < 0.1:
                        raise Wreck
            if random.random() < 0.1:
                raise Wreck
        time.sleep(0.005)
    connections.close_all()


def _publish_one() -> None:
    topic, key = random.choice(TOPICS), random.choice(KEYS)
    receipt = publish_raw(topic, b"{}", key=key)
    with connection.cursor() as cursor:
        cursor.execute(LOCK, [topic, key])
        cursor.execute("INSERT INTO storm_published VALUES (%s, %s, %s)", [str(receipt.message_id), topic, key])


def of_key(rows: list[tuple[Any, ...]], key: str) -> list[str]:
    """Return the ids of a key's messages on the ordered topic."""
    return [row[2] for row in rows if row[:2] == ("steps", key)]


def test_a_storm_loses_doubles_and_reorders_nothing(storm, threads):
    publishers = [threading.Thread(target=publish_until_calm, args=[storm]) for _ in range(2)]
    for publisher in publishers:
        publisher.start()

    with database.connect("default", application_name="the storm") as eye:
        ends_at = time.monotonic() + SECONDS
        while time.monotonic() < ends_at:
            eye.execute(CUT_ONE)
            time.sleep(random.uniform(0, 0.3))
        storm.clear()
        for publisher in publishers:
            publisher.join(20)
        wait_until(lambda: eye.execute(COUNT_OPEN).fetchone() == (0,), 60)

        published = eye.execute("SELECT topic, key, id FROM storm_published ORDER BY number").fetchall()
        shown = eye.execute(SHOWN).fetchall()
        lost = eye.execute("SELECT id FROM outbox_message_state WHERE state <> 'sent'").fetchall()

    assert published
    assert sorted(row[:3] for row in shown) == sorted(published)
    assert lost == []
    for key in KEYS:
        assert of_key(shown, key) == of_key(published, key)
    for topic, lane in {(row[0], row[3]) for row in shown}:
        numbers = sorted(row[4] for row in shown if (row[0], row[3]) == (topic, lane))
        assert numbers == list(range(1, len(numbers) + 1))

"""Consumers that wait are told; polling alone suffices."""

import threading
import time
from datetime import timedelta

import pytest

from outbox.brokers.base import Delivery
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker, wakeup
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness
from tests.waiting import wait_until

IDLE = "SELECT pid FROM outbox_embedded_idle"


@pytest.fixture
def consumer(acts: Acts, harness: EmbeddedHarness):
    """Start a consumer that waits; give the list of what it received, and when."""
    found: list[tuple[float, Delivery]] = []

    def work() -> None:
        for delivery in acts.receive(broker=harness.open(), wait=timedelta(seconds=8)):
            found.append((time.monotonic(), delivery))

    thread = threading.Thread(target=work)
    thread.start()
    yield found
    thread.join(10)


class TestWaitingConsumer:
    def test_is_told_of_a_message(self, acts: Acts, connection: Connection, consumer: list):
        wait_until(lambda: connection.execute(IDLE).fetchone())
        sent_at = time.monotonic()

        acts.send_bodies(b"a")

        [(received_at, _)] = wait_until(lambda: list(consumer))
        assert received_at - sent_at < wakeup.POLL_SECONDS / 2

    def test_finds_a_message_though_it_was_not_told(
        self, acts: Acts, connection: Connection, consumer: list, broker: EmbeddedBroker
    ):
        broker.backlog("group")
        wait_until(lambda: connection.execute(IDLE).fetchone())
        connection.execute("DELETE FROM outbox_embedded_idle")

        acts.send_bodies(b"a")

        [(_, delivery)] = wait_until(lambda: list(consumer), seconds=3)
        assert delivery.body == b"a"

    def test_says_that_it_waits_no_longer(self, acts: Acts, connection: Connection, consumer: list):
        wait_until(lambda: connection.execute(IDLE).fetchone())

        acts.send_bodies(b"a")

        wait_until(lambda: list(consumer))
        assert connection.execute(IDLE).fetchall() == []

    def test_looks_again_when_something_is_due(self, acts: Acts, harness: EmbeddedHarness, broker: EmbeddedBroker):
        acts.send_bodies(b"a")
        [delivery] = acts.receive()
        broker.retry(delivery, timedelta(seconds=0.3))
        started = time.monotonic()
        timer = threading.Timer(0.3, harness.pass_time, [timedelta(seconds=0.3)])
        timer.start()

        [again] = acts.receive(wait=timedelta(seconds=5))

        assert again.attempt == 2
        assert time.monotonic() - started < wakeup.POLL_SECONDS

    def test_that_died_is_forgotten_by_the_next(self, acts: Acts, connection: Connection):
        connection.execute("INSERT INTO outbox_embedded_idle VALUES (0)")

        acts.receive(wait=timedelta(seconds=0.05))

        assert connection.execute(IDLE).fetchall() == []


class TestNotify:
    def test_costs_nothing_when_nobody_waits(self, acts: Acts, connection: Connection):
        connection.execute("LISTEN outbox_embedded")

        acts.send_bodies(b"a")

        assert list(connection.notifies(timeout=0.2)) == []

"""Waiting consumers get notifications, but polling alone is enough."""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest

from outbox.brokers.base import Delivery
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker, wakeup
from outbox.errors import BrokerUnavailable
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import EmbeddedHarness
from tests.waiting import wait_until

REGISTERED = "SELECT pid FROM outbox_embedded_wakeup"
MOMENT = timedelta(seconds=0.05)


@pytest.fixture
def consumer(acts: Acts, harness: EmbeddedHarness):
    """Start a consumer that waits; return a list of the messages that it receives, with times."""
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
        wait_until(lambda: connection.execute(REGISTERED).fetchone())
        sent_at = time.monotonic()

        acts.send_bodies(b"a")

        [(received_at, _)] = wait_until(lambda: list(consumer))
        assert received_at - sent_at < wakeup.POLL_SECONDS / 2

    def test_is_told_though_another_program_notifies_something_else(self, acts: Acts, connection: Connection, consumer: list):
        wait_until(lambda: connection.execute(REGISTERED).fetchone())
        for payload in ("apples", "1:apples", ":"):
            connection.execute("SELECT pg_notify('outbox_embedded', %s)", [payload])

        acts.send_bodies(b"a")

        assert wait_until(lambda: list(consumer))

    def test_finds_a_message_though_it_was_not_told(
        self, acts: Acts, connection: Connection, consumer: list, broker: EmbeddedBroker
    ):
        broker.backlog("group")
        wait_until(lambda: connection.execute(REGISTERED).fetchone())
        connection.execute("DELETE FROM outbox_embedded_wakeup")

        acts.send_bodies(b"a")

        [(_, delivery)] = wait_until(lambda: list(consumer), seconds=3)
        assert delivery.body == b"a"

    def test_stays_registered_while_its_receives_bring_less_than_they_may(
        self, acts: Acts, connection: Connection, consumer: list
    ):
        before = wait_until(lambda: connection.execute(REGISTERED).fetchall())

        acts.send_bodies(b"a")

        wait_until(lambda: list(consumer))
        assert connection.execute(REGISTERED).fetchall() == before

    def test_is_told_nothing_more_when_a_receive_brings_all_it_may(self, acts: Acts, connection: Connection):
        acts.receive(wait=MOMENT)
        acts.send_bodies(b"a", b"b")
        was_registered = connection.execute(REGISTERED).fetchall() != []

        acts.receive(limit=2)

        assert was_registered
        assert connection.execute(REGISTERED).fetchall() == []

    @pytest.mark.usefixtures("unpolled")
    def test_is_told_again_when_it_has_caught_up(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        acts.receive(wait=MOMENT)
        acts.send_bodies(b"a")
        acts.receive(limit=1)
        sender = threading.Thread(
            target=lambda: wait_until(lambda: connection.execute(REGISTERED).fetchone()) and harness.open().send([acts.message()])
        )
        sender.start()
        started = time.monotonic()

        found = acts.receive(wait=timedelta(seconds=20))

        sender.join(10)
        assert len(found) == 1
        assert time.monotonic() - started < 10

    def test_is_told_nothing_while_it_handles_something_for_long(
        self, acts: Acts, connection: Connection, broker: EmbeddedBroker
    ):
        acts.send_bodies(b"a")
        held = acts.receive()
        acts.receive(wait=MOMENT)
        was_registered = connection.execute(REGISTERED).fetchall() != []

        broker.renew(held, INVISIBLE)

        assert was_registered
        assert connection.execute(REGISTERED).fetchall() == []

    def test_is_told_though_another_thread_renews(
        self, acts: Acts, connection: Connection, broker: EmbeddedBroker, harness: EmbeddedHarness
    ):
        acts.send_bodies(b"a")
        held = acts.receive()
        waiting = threading.Thread(target=acts.receive, kwargs={"wait": timedelta(seconds=20)})
        waiting.start()
        wait_until(lambda: connection.execute(REGISTERED).fetchone())

        broker.renew(held, INVISIBLE)
        is_registered = connection.execute(REGISTERED).fetchall() != []

        harness.open().send([acts.message()])
        waiting.join(20)
        assert is_registered

    def test_is_registered_until_it_closes(self, acts: Acts, connection: Connection, broker: EmbeddedBroker):
        acts.receive(wait=MOMENT)
        was_registered = connection.execute(REGISTERED).fetchall() != []

        broker.close()

        assert was_registered
        assert connection.execute(REGISTERED).fetchall() == []

    def test_is_registered_anew_when_its_connection_broke(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        acts.receive(wait=MOMENT)
        before = connection.execute(REGISTERED).fetchall()
        harness.restart()

        with suppress(BrokerUnavailable):
            acts.receive(wait=MOMENT)
        acts.receive(wait=MOMENT)

        [now] = connection.execute(REGISTERED).fetchall()
        assert now not in before

    @pytest.mark.usefixtures("unpolled")
    def test_looks_again_soon_where_another_was_faster(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        acts.receive()
        acts.send_bodies(b"a")
        started = time.monotonic()
        found: list[Delivery] = []
        late = threading.Thread(target=lambda: found.extend(acts.receive(wait=timedelta(seconds=20))))

        with connection.transaction():
            connection.execute("SELECT FROM outbox_embedded_offset FOR UPDATE")
            late.start()
            late.join(0.3)
        late.join(20)

        assert [delivery.body for delivery in found] == [b"a"]
        assert time.monotonic() - started < 10

    def test_looks_again_when_something_is_due(self, acts: Acts, harness: EmbeddedHarness):
        acts.send_bodies(b"a")
        acts.receive(hold=timedelta(seconds=0.3))
        started = time.monotonic()
        timer = threading.Timer(0.3, harness.pass_time, [timedelta(seconds=0.3)])
        timer.start()

        [again] = acts.receive(wait=timedelta(seconds=5))

        assert again.delivery_count == 2
        assert time.monotonic() - started < wakeup.POLL_SECONDS

    def test_that_died_is_forgotten_by_the_next(self, acts: Acts, connection: Connection):
        connection.execute("INSERT INTO outbox_embedded_wakeup VALUES (0)")

        acts.receive(wait=MOMENT)

        assert (0,) not in connection.execute(REGISTERED).fetchall()


class TestNotify:
    def test_costs_nothing_when_nobody_waits(self, acts: Acts, connection: Connection):
        connection.execute("LISTEN outbox_embedded")

        acts.send_bodies(b"a")

        assert list(connection.notifies(timeout=0.2)) == []

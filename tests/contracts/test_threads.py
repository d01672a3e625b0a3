"""Calls that may come from another thread than the one that uses a broker."""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest

from outbox.brokers.base import Broker, Delivery
from outbox.errors import BrokerUnavailable
from outbox.message import TopicType
from tests.contracts.acts import HELD, Acts
from tests.contracts.harness import Harness

WAIT = timedelta(seconds=50)


class TestRenew:
    def test_may_come_from_a_second_thread_while_the_first_waits(self, acts: Acts, broker: Broker, harness: Harness):
        acts.send_bodies(b"a")
        held = acts.receive()
        waits = [harness.topic(TopicType.NORMAL)]
        found: list[Delivery] = []

        def wait() -> None:
            found.extend(broker.receive("group", waits, limit=1, invisible_for=HELD, wait=timedelta(minutes=5)))

        first = threading.Thread(target=wait)
        first.start()

        for _ in range(5):
            held = [one for one in broker.renew(held, HELD) if one is not None]
        was_waiting = first.is_alive()
        harness.open().send([acts.message(body=b"b")])
        first.join(120)

        assert was_waiting
        assert broker.ack(held) == [True]
        assert [delivery.body for delivery in found] == [b"b"]


class TestRelease:
    def test_from_a_second_thread_ends_the_wait_of_the_first(
        self, acts: Acts, broker: Broker, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ):
        harness.without_polls(monkeypatch)
        acts.send_bodies(b"a")
        held = acts.receive()
        found: list[Delivery] = []
        first = threading.Thread(target=lambda: found.extend(acts.receive(wait=WAIT)))
        first.start()
        first.join(0.5)  # it waits, as far as one can tell from here
        was_waiting = first.is_alive()

        started = time.monotonic()
        broker.release(held)
        first.join(120)

        assert was_waiting
        assert [delivery.body for delivery in found] == [b"a"]
        assert time.monotonic() - started < WAIT.total_seconds() / 2


class TestClose:
    def test_ends_a_wait_of_another_thread(self, acts: Acts, broker: Broker):
        waiting = threading.Thread(target=_receive_until_closed, args=(acts,))
        waiting.start()
        started = time.monotonic()

        while waiting.is_alive():  # it may not have begun to wait yet
            broker.close()
            waiting.join(0.1)

        assert time.monotonic() - started < WAIT.total_seconds() / 2


def _receive_until_closed(acts: Acts) -> None:
    with suppress(BrokerUnavailable):
        acts.receive(wait=WAIT)

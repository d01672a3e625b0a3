"""A handler that takes its time: renewed, broken off at its limit, and what waits behind it deferred."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta

import pytest
from django.db import connections

from outbox import RetryPolicy, conf, consumer, shutdown
from outbox.brokers.memory import MemoryBroker
from outbox.consuming import lease_thread
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.errors import TimeLimitExceeded
from outbox.models import Deferred, FailedDelivery
from outbox.shutdown import ShutdownWatch
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import applied, delivery, errors, outgoing
from tests.outbox.consuming.messages import Placed
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

NO_WAIT = timedelta(0)
INVISIBLE = 0.6
NO_RETRY = RetryPolicy(limit=0)


@pytest.fixture(autouse=True)
def _soon_visible(settings) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "CONSUMER": {"INVISIBLE": timedelta(seconds=INVISIBLE)}}


@pytest.fixture
def beside() -> Iterator[object]:
    """Run workers of a group in threads of their own, until the test ends."""
    stop = threading.Event()
    started: list[threading.Thread] = []
    workers: list[Worker] = []

    def work(worker: Worker) -> None:
        try:
            worker.run()
        finally:
            worker.close()
            connections.close_all()

    def start(name: str) -> Worker:
        worker = Worker(group(name), "default", stop=stop)
        workers.append(worker)
        started.append(threading.Thread(target=work, args=(worker,)))
        started[-1].start()
        return worker

    yield start
    stop.set()
    for thread in started:
        thread.join()


@pytest.fixture
def renewed(monkeypatch) -> set[str]:
    """The ids of the messages that were renewed."""
    found: set[str] = set()
    renew = MemoryBroker.renew

    def note(client, deliveries, invisible_for):
        found.update(delivery.message_id for delivery in deliveries)
        return renew(client, deliveries, invisible_for)

    monkeypatch.setattr(MemoryBroker, "renew", note)
    return found


class TestSlowHandler:
    def test_is_renewed(self, broker, renewed):
        sent = outgoing(Placed("A1"))
        consumer(Placed, group="slow")(lambda message, context: wait_until(lambda: sent.message_id in renewed))
        broker.send([sent])

        with closing(Worker(group("slow"), "default")) as worker:
            worker.step(NO_WAIT)

        assert worker.counts.handled == 1

    def test_lets_nobody_else_have_its_message(self, broker, beside):
        @consumer(Placed, group="slow")
        def work(message, context):
            threading.Event().wait(3 * INVISIBLE)
            CartEntry.objects.create(invoice=message.invoice, change=1)

        broker.send([outgoing(Placed("A1"))])
        first, second = beside("slow"), beside("slow")

        wait_until(lambda: applied() and not sum(broker.backlog("slow").waiting.values()))

        assert applied() == ["A1"]
        assert first.counts.handled + second.counts.handled == 1
        assert first.counts.duplicates + second.counts.duplicates + first.counts.late + second.counts.late == 0

    def test_that_fails_in_the_end_is_given_up_after_its_limit_and_stops_nobody(self, broker, beside):
        @consumer(Placed, group="slow", retry=RetryPolicy(limit=1, delays=[NO_WAIT], jitter=0))
        def work(message, context):
            if message.invoice == "bad":
                threading.Event().wait(2 * INVISIBLE)
                raise ValueError("after all not")
            CartEntry.objects.create(invoice=message.invoice, change=1)

        broker.send([outgoing(Placed("bad")), *(outgoing(Placed(f"A{number}")) for number in range(9))])
        beside("slow")
        beside("slow")

        wait_until(lambda: errors("slow") and not sum(broker.backlog("slow").waiting.values()) and len(applied()) == 9)

        assert errors("slow") == ["ValueError: after all not"]
        assert sorted(applied()) == [f"A{number}" for number in range(9)]
        assert FailedDelivery.objects.count() == 2

    def test_has_what_waits_behind_it_deferred(self, broker, beside, monkeypatch):
        monkeypatch.setattr(lease_thread, "SLOW_SECONDS", 0.1)
        begun, release = threading.Event(), threading.Event()

        @consumer(Placed, group="slow")
        def work(message, context):
            CartEntry.objects.create(invoice=message.invoice, change=1)
            if message.invoice == "A0":
                begun.set()
                assert release.wait(20)

        broker.send([outgoing(Placed(f"A{number}")) for number in range(5)])
        beside("slow")
        assert begun.wait(20)
        beside("slow")

        wait_until(lambda: len(applied()) == 4)
        release.set()

        wait_until(lambda: len(applied()) == 5 and not Deferred.objects.exists())

    def test_keeps_what_waits_for_its_key(self, broker, monkeypatch, settings):
        """What is deferred would get before it if it fails."""
        topics = {**settings.OUTBOX["TOPICS"], "orders": {**settings.OUTBOX["TOPICS"]["orders"], "TYPE": "fifo"}}
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": topics}
        monkeypatch.setattr(lease_thread, "SLOW_SECONDS", 0.1)
        deliveries = [
            delivery(Placed(invoice), group="slow", key=key) for invoice, key in (("A1", "A"), ("B1", "B"), ("A2", "A"))
        ]

        @consumer(Placed, group="slow")
        def work(message, context):
            wait_until(Deferred.objects.exists)
            seen.append([row.key for row in Deferred.objects.all()])

        seen: list[list[str]] = []
        monkeypatch.setattr(MemoryBroker, "receive", lambda *arguments, **named: deliveries)
        monkeypatch.setattr(MemoryBroker, "ack", lambda client, given: [True] * len(given))
        with closing(Worker(group("slow"), "default")) as worker:
            worker.step(NO_WAIT)

        assert seen[0] == ["B"]
        assert worker.counts.handled == 2

    def test_is_reported_when_it_runs_for_very_long(self, broker, monkeypatch, caplog, alerts):
        monkeypatch.setattr(lease_thread, "REPORTED_AFTER", 1)

        @consumer(Placed, group="slow")
        def work(message, context):
            wait_until(lambda: alerts)

        broker.send([outgoing(Placed("A1"))])
        worker = Worker(group("slow"), "default")
        worker.step(NO_WAIT)
        worker.close()

        assert "set a time_limit" in alerts[0]["reason"]
        assert worker.counts.handled == 1

    def test_has_what_is_done_acknowledged(self, broker):
        @consumer(Placed, group="slow")
        def work(message, context):
            if message.invoice == "A1":
                wait_until(lambda: broker.backlog("slow").waiting == {"orders": 1})

        broker.send([outgoing(Placed("A0")), outgoing(Placed("A1"))])
        with closing(Worker(group("slow"), "default")) as worker:
            worker.step(NO_WAIT)

        assert (worker.counts.handled, worker.counts.late) == (2, 0)


def test_a_message_whose_time_is_over_is_not_begun(broker):
    held = LeaseThread()

    held.hold(broker, [[delivery(Placed("A1"))]], received_at=time.monotonic() - INVISIBLE)

    assert held.take() == []


class TestTimeLimit:
    def run(self, broker: MemoryBroker) -> str:
        broker.send([outgoing(Placed("A1"))])
        worker = Worker(group("limited"), "default")
        began = time.monotonic()
        worker.step(NO_WAIT)
        worker.close()
        assert time.monotonic() - began < 10
        assert not applied()
        [error] = errors("limited")
        return error

    def test_breaks_a_loop_off(self, broker):
        @consumer(Placed, group="limited", time_limit=timedelta(seconds=0.2), retry=NO_RETRY)
        def loop(message, context):
            CartEntry.objects.create(invoice=message.invoice, change=1)
            while True:
                with suppress(Exception):
                    int("no")

        assert self.run(broker) == "TimeLimitExceeded"

    def test_breaks_a_coroutine_off_where_it_awaits(self, broker):
        @consumer(Placed, group="limited", time_limit=timedelta(seconds=0.2), retry=NO_RETRY)
        async def wait(message, context):
            await CartEntry.objects.acreate(invoice=message.invoice, change=1)
            await asyncio.sleep(60)

        assert self.run(broker) == "TimeLimitExceeded"

    def test_leaves_a_time_out_of_the_handlers_own_alone(self, broker):
        @consumer(Placed, group="limited", time_limit=timedelta(seconds=60), retry=NO_RETRY)
        async def wait(message, context):
            raise TimeoutError("of a service")

        assert self.run(broker) == "TimeoutError: of a service"

    def test_interrupts_a_handler_again_that_catches_it(self, broker, monkeypatch):
        monkeypatch.setattr(lease_thread, "INTERRUPT_SECONDS", 0.1)
        caught = []

        @consumer(Placed, group="limited", time_limit=timedelta(seconds=0.2), retry=NO_RETRY)
        def work(message, context):
            CartEntry.objects.create(invoice=message.invoice, change=1)
            while len(caught) < 3:
                try:
                    time.sleep(0.05)
                except BaseException as error:
                    caught.append(type(error))
            while True:
                time.sleep(0.05)

        assert self.run(broker) == "TimeLimitExceeded"
        assert caught == [TimeLimitExceeded] * 3

    @pytest.mark.parametrize(
        ("may_exit", "effect"),
        [(True, "This process ends, so that its supervisor starts it again."), (False, "This process does not end")],
    )
    def test_gives_up_a_handler_that_runs_on_and_says_what_becomes_of_its_process(
        self, broker, monkeypatch, caplog, may_exit, effect
    ):
        monkeypatch.setattr(lease_thread, "GIVE_UP_SECONDS", 0.2)
        monkeypatch.setattr(shutdown, "LIMIT_SECONDS", 0.2)
        exits = []
        monkeypatch.setattr(os, "_exit", exits.append)
        watch = ShutdownWatch(lambda: 0, list, may_exit=may_exit)
        watch.start()

        @consumer(Placed, group="limited", time_limit=timedelta(seconds=0.2))
        def work(message, context):
            while "limited' still runs 0 s after its time_limit of 0.2 s" not in caplog.text or (may_exit and not exits):
                with suppress(BaseException):
                    time.sleep(0.05)

        broker.send([outgoing(Placed("A1"))])
        worker = Worker(group("limited"), "default")
        worker.step(NO_WAIT)
        worker.close()
        watch.close()

        assert effect in caplog.text
        assert exits == ([shutdown.GIVEN_UP] if may_exit else [])
        assert watch.requested.is_set() is may_exit

    def test_hurts_no_handler_that_ends_in_time(self, broker):
        @consumer(Placed, group="limited", time_limit=timedelta(seconds=0.5))
        def work(message, context):
            CartEntry.objects.create(invoice=message.invoice, change=1)

        broker.send([outgoing(Placed(f"A{number}")) for number in range(100)])
        with closing(Worker(group("limited"), "default")) as worker:
            # Again, since on a busy machine the time of some is over before they are begun; then they come later.
            wait_until(lambda: worker.run(until_idle=True).handled == 100)

    def test_is_no_exception_that_a_handler_catches_by_chance(self):
        assert not issubclass(TimeLimitExceeded, Exception)


def test_keeps_nothing_alive_that_has_ended(broker):
    """The thread sends statements over the handler's connection; none behind its end."""
    consumer(Placed, group="fast")(lambda message, context: CartEntry.objects.create(invoice=message.invoice, change=1))
    broker.send([outgoing(Placed(f"A{number}")) for number in range(300)])
    worker = Worker(group("fast"), "default")

    worker.run(until_idle=True)
    worker.close()

    assert worker.counts.handled == 300
    assert conf.settings().consumer.invisible.total_seconds() == INVISIBLE

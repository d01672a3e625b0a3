"""Odd ways for a run to end: counted where the handler is to blame, and nowhere else."""

import asyncio
import hashlib
import os
import signal
import sys
import threading
import time
from contextlib import closing
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection, transaction
from msgspec.structs import replace

from outbox import RetryPolicy, apublish, consumer, database, signals
from outbox.consuming.handle import handle
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.database import heartbeats
from outbox.errors import BrokerUnavailable
from outbox.message import Header
from outbox.models import Deferred, Duplicate, FailedDelivery, Inbox
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import delivery, errors, numbered, outgoing, run_due
from tests.outbox.consuming.messages import Ignored, Placed

pytestmark = pytest.mark.django_db(transaction=True)

NO_WAIT = timedelta(0)
NO_RETRY = RetryPolicy(limit=0)
ID = "0b2504e0-4f89-11d3-9a0c-0305e82c3309"
END_THIS_CONNECTION = "SELECT pg_terminate_backend(pg_backend_pid())"


def write(message, context) -> None:
    CartEntry.objects.create(invoice=message.invoice, change=-1)


class TestHandlerThatForgetsToAwait:
    def test_apublish_has_failed_and_nothing_is_written(self):
        @consumer(Placed, group="cart", retry=NO_RETRY)
        async def clear_cart(message, context):
            await CartEntry.objects.acreate(invoice=message.invoice, change=-1)
            apublish(message)

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEAD_LETTER
        assert "NotAwaited: apublish() was called once" in errors()[0]
        assert not CartEntry.objects.exists()


class TestMessageWithoutAnId:
    def test_is_a_dead_letter_that_says_so_and_no_duplicate_of_another(self):
        consumer(Placed, group="cart")(write)

        results = [handle(group("cart"), replace(delivery(Placed(name)), message_id="")) for name in ("A1", "A2")]

        assert [result.outcome for result in results] == [Outcome.DEAD_LETTER] * 2
        assert "has no message id" in errors()[0]
        assert not CartEntry.objects.exists()
        assert not Duplicate.objects.exists()

    def test_whose_bytes_cannot_be_read_reaches_no_handler_when_it_is_replayed(self):
        handled = []
        consumer(topic="orders", group="cart")(handled.append)
        unread = delivery(Placed("A1"), headers={Header.UNREADABLE: "Its body is marked as compressed."})
        handle(group("cart"), replace(unread, message_id=""))

        call_command("outbox_replay", "--all")

        assert run_due() == [Outcome.DEAD_LETTER]
        assert handled == []


class TestTwoProducersWithTheSameId:
    @pytest.mark.parametrize("named", ["1", ID], ids=["text", "uuid"])
    def test_are_told_apart_by_their_source(self, named):
        consumer(Placed, group="cart")(write)
        sources = ("/shops/1", "/shops/2", "/shops/2")

        results = [handle(group("cart"), delivery(Placed("A1"), named=named, headers={Header.SOURCE: one})) for one in sources]

        assert [result.outcome for result in results] == [Outcome.HANDLED, Outcome.HANDLED, Outcome.DUPLICATE]
        assert CartEntry.objects.count() == 2

    @pytest.mark.parametrize("named", ["1", ID], ids=["text", "uuid"])
    def test_are_told_apart_by_their_topic_where_they_name_no_source(self, named):
        for topic in ("orders", "parcels"):
            consumer(topic=topic, group="cart")(lambda message: None)
        topics = ("orders", "parcels", "parcels")

        results = [handle(group("cart"), replace(delivery(Placed("A1"), named=named), topic=topic)) for topic in topics]

        assert [result.outcome for result in results] == [Outcome.HANDLED, Outcome.HANDLED, Outcome.DUPLICATE]

    def test_have_dead_letters_of_their_own(self, broker, worker):
        @consumer(Placed, group="cart", retry=NO_RETRY)
        def fail(message, context):
            raise ValueError(context.source)

        for one in ("/shops/1", "/shops/2"):
            broker.send([outgoing(Placed("A1"), named="1", headers={Header.SOURCE: one})])
        worker().run(until_idle=True)

        assert sorted(errors()) == ["ValueError: /shops/1", "ValueError: /shops/2"]


class TestForeignProducer:
    @pytest.mark.parametrize("headers", [numbered(2**63), numbered(1, lane=2**15), numbered("9" * 5000), {Header.SOURCE: "a\0b"}])
    def test_may_number_its_messages_as_it_likes(self, headers):
        consumer(Placed, group="cart")(write)

        assert handle(group("cart"), delivery(Placed("A1"), headers=headers)).outcome is Outcome.HANDLED
        assert handle(group("cart"), delivery(Ignored(), headers=headers)).outcome is Outcome.IGNORED

    def test_may_number_the_messages_of_a_source_that_is_longer_than_an_index_entry(self):
        consumer(Placed, group="cart")(write)
        source = "/" + "".join(hashlib.sha256(bytes([number])).hexdigest() for number in range(100))
        deliveries = [delivery(Placed(name), named=name, headers=numbered(1, source=source)) for name in ("A1", "A2")]

        assert handle(group("cart"), deliveries[0]).outcome is Outcome.HANDLED
        assert handle(group("cart"), deliveries[0]).outcome is Outcome.DUPLICATE
        assert handle(group("cart"), replace(deliveries[1], delivery_count=2)).outcome is Outcome.DEFERRED
        assert run_due() == [Outcome.HANDLED]
        assert handle(group("cart"), deliveries[1]).outcome is Outcome.DUPLICATE

    def test_may_write_nul_into_a_tag(self):
        consumer(Placed, group="cart")(write)

        assert handle(group("cart"), replace(delivery(Ignored()), tag="a\0b")).outcome is Outcome.IGNORED

    def test_may_write_nul_into_the_id_of_a_message_that_a_heartbeat_names(self):
        @consumer(Placed, group="cart")
        def report(message, context):
            heartbeats.beat(database.raw("default"), "consumer", handling=lease_thread.running())

        with closing(LeaseThread()) as lease_thread:
            result = handle(group("cart"), delivery(Placed("A1"), named="a\0b"), lease_thread)

        assert result.outcome is Outcome.HANDLED

    def test_may_write_nul_behind_a_type_without_its_message_being_run_again_and_again(self, worker):
        consumer(Placed, group="cart")(write)
        odd = delivery(Placed("A1"))
        handle(group("cart"), replace(odd, headers={**odd.headers, Header.TYPE: f"{odd.headers[Header.TYPE]}\0"}))

        worker().run(until_idle=True)

        assert (Deferred.objects.get().reason, Deferred.objects.get().runs) == ("no handler", 0)

    @pytest.mark.parametrize("body", [b"[" * 20_000, b'{"invoice": "\xff"}'], ids=["arrays in arrays", "no UTF-8"])
    @pytest.mark.parametrize("options", [{}, {"topic": "orders"}], ids=["type", "topic"])
    def test_may_write_what_is_no_json_into_a_body(self, options, body):
        consumer(*([] if options else [Placed]), group="cart", **options)(write)

        odd = delivery(Placed("A1"))
        odd = replace(odd, body=body, headers={**odd.headers, Header.CONTENT_TYPE: "application/json"})

        assert handle(group("cart"), odd).outcome is Outcome.DEAD_LETTER
        assert odd.message_id in errors()[0]


class TestHandler:
    def test_that_closes_its_connection_has_failed(self):
        consumer(Placed, group="cart", retry=NO_RETRY)(lambda message, context: connection.close())

        assert handle(group("cart"), delivery(Placed("A1"))).outcome is Outcome.DEAD_LETTER
        assert "closed the connection of database 'default'" in errors()[0]

    def test_that_wraps_the_error_of_a_lost_connection_has_not_failed(self):
        @consumer(Placed, group="cart", retry=NO_RETRY)
        def wrap(message, context):
            try:
                with connection.cursor() as cursor:
                    cursor.execute(END_THIS_CONNECTION)
            except OperationalError as error:
                raise RuntimeError("the shop is closed") from error

        connection.ensure_connection()
        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.RELEASED
        assert not Deferred.objects.exists()

    def test_is_broken_off_in_the_middle_of_a_statement(self):
        @consumer(Placed, group="cart", retry=NO_RETRY, time_limit=timedelta(seconds=0.3))
        def wait(message, context):
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_sleep(30)")

        began = time.monotonic()
        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEAD_LETTER
        assert time.monotonic() - began < 10

    def test_that_is_a_coroutine_ends_when_its_wait_is_broken_off(self, monkeypatch):
        steps = []
        ended = threading.Event()

        @consumer(Placed, group="cart", retry=NO_RETRY)
        async def work(message, context):
            try:
                for step in range(100):
                    steps.append(step)
                    await asyncio.sleep(0.05)
            finally:
                ended.set()

        def interrupt(signum, frame):
            raise TimeoutError("of the task that the worker runs in")

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        try:
            result = handle(group("cart"), delivery(Placed("A1")))
        finally:
            signal.signal(signal.SIGALRM, before)

        assert result.outcome is Outcome.DEAD_LETTER
        assert ended.is_set()
        assert len(steps) < 50


class TestAlert:
    def test_whose_listener_breaks_the_database_costs_no_count(self, fifo):
        def break_database(**said):
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / 0")

        @consumer(Placed, group="cart", retry=RetryPolicy(limit=0, delays=[timedelta(hours=1)], jitter=0))
        def fail(message, context):
            raise ValueError("no")

        signals.alert.connect(break_database, weak=False, dispatch_uid="test")
        try:
            result = handle(group("cart"), delivery(Placed("A1"), key="A"))
        finally:
            signals.alert.disconnect(dispatch_uid="test")

        assert result.outcome is Outcome.DEFERRED
        assert Deferred.objects.get().failures == FailedDelivery.objects.count() == 1


class TestEndOfProcess:
    @pytest.fixture
    def sigterm(self):
        """SIGTERM raises, as in a child of Celery's prefork pool; give what sends it."""

        def exit_now(signum, frame):
            sys.exit(-(256 - signum))

        before = signal.signal(signal.SIGTERM, exit_now)
        yield lambda: (os.kill(os.getpid(), signal.SIGTERM), threading.Event().wait(5))
        signal.signal(signal.SIGTERM, before)

    def test_in_a_hook_behind_the_commit_ends_the_worker(self, broker, sigterm):
        @consumer(Placed, group="cart")
        def notify(message, context):
            write(message, context)
            transaction.on_commit(sigterm)

        broker.send([outgoing(Placed("A1")), outgoing(Placed("A2"))])
        worker = Worker(group("cart"), "default")

        with pytest.raises(SystemExit):
            worker.run(until_idle=True)

        assert CartEntry.objects.count() == Inbox.objects.count() == 1
        assert broker.backlog("cart").waiting == {"orders": 0}
        assert Deferred.objects.get().reason == "stop"

    def test_ends_the_worker_though_the_broker_is_away(self, broker, sigterm, monkeypatch):
        consumer(Placed, group="cart")(lambda message, context: sigterm())
        broker.send([outgoing(Placed("A1"))])
        worker = Worker(group("cart"), "default")

        def away(*_):
            raise BrokerUnavailable("gone")

        monkeypatch.setattr(type(broker), "ack", away)

        with pytest.raises(SystemExit):
            worker.run(until_idle=True)

"""What is counted of a message, and what is not: failures of its handler, and runs that never ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from django.db import connection, connections, transaction
from django.db.models.functions import Now

from outbox import Reject, Retry, RetryLater, consumer, database
from outbox.consuming import outcome
from outbox.consuming.dead_letters import read_letters, settle_letters
from outbox.consuming.delivery_info import DeliveryInfo
from outbox.consuming.handle import handle
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.message import Header
from outbox.models import FailedDelivery, FailureCount, Inbox
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import delivery, end_delays, outgoing
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db

NO_WAIT = timedelta(0)
SECOND = timedelta(seconds=1)


class Handler:
    """Raises what it is given, one after the other, then applies; knows what it was told."""

    def __init__(self, **options) -> None:
        self.errors: list[BaseException] = []
        self.contexts = []
        consumer(Placed, group="cart", **{"retry": Retry(limit=2, delays=[SECOND], jitter=0)} | options)(self.handle)

    def handle(self, message, context) -> None:
        self.contexts.append(context)
        CartEntry.objects.create(invoice=message.invoice, change=-1)
        if self.errors:
            raise self.errors.pop(0)


def deliver(*, delivery_count: int = 1, key: str = "", is_early: bool = False) -> object:
    """Deliver one and the same message for the n-th time, by default when its delay is over."""
    if not is_early:
        end_delays()
    same = delivery(Placed("A1"), named="0b2504e0-4f89-11d3-9a0c-0305e82c3309", delivery_count=delivery_count, key=key)
    return handle(group("cart"), same)


def begin_and_die(delivery_count: int) -> None:
    """Begin a run that never ends."""
    same = delivery(Placed("A1"), named="0b2504e0-4f89-11d3-9a0c-0305e82c3309", delivery_count=delivery_count)
    outcome.begin_run(DeliveryInfo.of(same), same.message_id, "a process that is gone", "default")


class TestDelays:
    """A message may come before its delay is over: the broker did not take the retry, or the process died before it asked."""

    LATER = Retry(limit=1, delays=[timedelta(minutes=5)], jitter=0)

    def test_are_kept_by_a_message_that_comes_early_without_another_run(self):
        handler = Handler(retry=self.LATER)
        handler.errors = [ValueError("1"), ValueError("2")]

        first, early, again = deliver(), deliver(delivery_count=2, is_early=True), deliver(delivery_count=3, is_early=True)

        assert first.outcome is Outcome.RETRY
        assert [early.outcome, again.outcome] == [Outcome.HANDED_BACK] * 2
        assert timedelta(minutes=4) < early.after <= timedelta(minutes=5)
        assert len(handler.contexts) == FailureCount.objects.get().failures == 1

    def test_are_kept_by_one_that_cannot_be_read(self):
        Handler(retry=self.LATER)
        newer = delivery(Placed(""), body=b'{"no": 1}', headers={Header.VERSION: "3"})

        first = handle(group("cart"), newer)
        early = handle(group("cart"), replace(newer, delivery_count=2))

        assert (first.outcome, early.outcome) == (Outcome.RETRY, Outcome.HANDED_BACK)
        assert FailureCount.objects.get().failures == 1

    def test_end_by_themselves(self):
        handler = Handler(retry=self.LATER)
        handler.errors = [ValueError("1")]
        deliver()

        FailureCount.objects.update(due_at=Now())
        result = deliver(delivery_count=2)

        assert result.outcome is Outcome.HANDLED
        assert not FailureCount.objects.exists()


class TestMessageThatWasGivenUp:
    def test_is_given_up_again_for_the_same_reason_and_not_handled(self):
        handler = Handler(retry=Retry(limit=0))
        handler.errors = [ValueError("no such customer")]

        first, again = deliver(), deliver(delivery_count=2)

        assert first.outcome is again.outcome is Outcome.DEAD_LETTER
        assert again.reason == first.reason == "failed 1 time, last: ValueError: no such customer"
        assert len(handler.contexts) == FailedDelivery.objects.count() == 1

    @pytest.mark.parametrize("delivery_count", [1, 2])
    def test_is_dropped_when_another_copy_comes_after_its_dead_letter(self, broker, worker, delivery_count):
        handler = Handler(retry=Retry(limit=0))
        handler.errors = [ValueError("no such customer")] * 2
        broker.send([outgoing(Placed("A1"), named="0b2504e0-4f89-11d3-9a0c-0305e82c3309")])
        worker().run(until_idle=True)

        result = deliver(delivery_count=delivery_count)

        assert result.outcome is Outcome.DUPLICATE
        assert len(broker.dead_letters("cart")) == FailedDelivery.objects.count() == 1

    def test_is_handled_when_it_is_replayed(self, broker, worker):
        handler = Handler(retry=Retry(limit=0))
        handler.errors = [ValueError("no such customer")]
        broker.send([outgoing(Placed("A1"))])
        worker().run(until_idle=True)

        for _ in settle_letters(read_letters().found, by="a test"):
            worker().run(until_idle=True)

        assert len(handler.contexts) == 2
        assert not FailureCount.objects.exists()


class TestFailures:
    def test_are_counted_and_not_how_often_the_message_was_delivered(self):
        handler = Handler()
        handler.errors = [ValueError("1"), ValueError("2"), ValueError("3")]

        outcomes = [deliver(delivery_count=n).outcome for n in (40, 41, 55)]

        assert outcomes == [Outcome.RETRY, Outcome.RETRY, Outcome.DEAD_LETTER]
        assert [context.failures for context in handler.contexts] == [0, 1, 2]

    def test_do_not_count_what_the_handler_asked_for_later(self):
        handler = Handler()
        handler.errors = [RetryLater(1)] * 5 + [ValueError("1")]

        outcomes = [deliver(delivery_count=n).outcome for n in range(1, 7)]

        assert outcomes == [Outcome.RETRY] * 6
        assert FailureCount.objects.get().failures == 1

    def test_are_forgotten_when_the_message_is_handled(self):
        Handler().errors = [ValueError("1")]

        deliver()
        assert FailureCount.objects.get().failures == 1
        assert deliver(delivery_count=2).outcome is Outcome.HANDLED

        assert not FailureCount.objects.exists()

    def test_cost_a_first_delivery_no_statement(self, django_assert_num_queries):
        Handler()

        with django_assert_num_queries(4):  # savepoint, claim, the handler's own, release
            deliver(is_early=True)

    def test_say_in_the_dead_letter_how_many_they_were(self):
        Handler(retry=Retry(limit=0)).errors = [ValueError("no")]

        assert deliver(delivery_count=9).reason == "failed 1 time, last: ValueError: no"

    def test_begin_anew_when_an_operator_replays_the_letter(self, broker, worker, clock):
        handler = Handler()
        handler.errors = [ValueError("no")] * 5
        at_work = worker()
        broker.send([outgoing(Placed("A1"))])
        for _ in range(3):
            at_work.step(NO_WAIT)
            clock.forward(SECOND)
            end_delays()
        (letter,) = read_letters().found
        assert FailureCount.objects.get().failures == 3

        assert list(settle_letters([letter], by="ada"))
        at_work.step(NO_WAIT)

        assert FailureCount.objects.get().failures == 1
        assert not broker.dead_letters("cart")


class TestCrashes:
    def test_are_runs_that_were_begun_and_never_ended(self):
        handler = Handler()
        for delivery_count in range(2, 2 + outcome.CRASH_LIMIT):
            begin_and_die(delivery_count)

        result = deliver(delivery_count=7)

        assert result.outcome is Outcome.DEAD_LETTER
        assert result.reason.startswith("begun 5 times, never ended: ")
        assert not handler.contexts
        assert FailedDelivery.objects.get().fingerprint.startswith("NeverEnded")

    def test_leave_the_failures_as_they_are(self):
        handler = Handler()
        handler.errors = [ValueError("1")]
        begin_and_die(2)
        begin_and_die(3)

        assert deliver(delivery_count=4).outcome is Outcome.RETRY

        row = FailureCount.objects.get()
        assert (row.failures, row.crashes, row.begun_at) == (1, 2, None)

    def test_are_none_where_a_run_ends_whatever_its_end(self):
        handler = Handler()
        handler.errors = [ValueError("1"), RetryLater(1), RetryLater(1)]
        for delivery_count in range(2, 5):
            deliver(delivery_count=delivery_count)

        assert FailureCount.objects.get().crashes == 0

    def test_end_with_the_outage_that_hid_their_end(self, broker, worker, monkeypatch, clock):
        Handler()
        at_work = worker()
        begin_and_die(2)
        FailureCount.objects.update(begun_by=at_work._name)
        at_work._has_unended = True

        at_work.step(NO_WAIT)

        assert FailureCount.objects.get().begun_at is None

    def test_block_an_ordered_key_and_are_run_again(self, fifo, caplog):
        handler = Handler(ordered=True, retry=Retry(limit=0, delays=[SECOND], jitter=0))
        for delivery_count in range(2, 2 + outcome.CRASH_LIMIT):
            begin_and_die(delivery_count)

        blocked = deliver(delivery_count=7, key="A1")
        result = deliver(delivery_count=8, key="A1")

        assert (blocked.outcome, blocked.after) == (Outcome.RETRY, SECOND)
        assert "holds back all later messages of the key 'A1'" in caplog.text
        assert result.outcome is Outcome.HANDLED
        assert len(handler.contexts) == 1


@pytest.fixture
def fifo(settings) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {**settings.OUTBOX["TOPICS"], "orders": {"TYPE": "fifo"}}}


class TestOrdered:
    def test_unknown_type_blocks_its_key_when_its_retries_are_used_up(self, fifo):
        Handler(ordered=True)
        unknown = delivery(Placed("A1"), headers={Header.TYPE: "OrderFrobbed"}, key="A1")
        FailureCount.objects.create(consumer_group="cart", message_id=unknown.message_id, topic="orders", failures=99)

        assert handle(group("cart"), unknown).outcome is Outcome.RETRY

    def test_body_that_does_not_fit_blocks_its_key(self, fifo):
        Handler(ordered=True)

        assert handle(group("cart"), delivery(Placed("A1"), body=b"{", key="A1")).outcome is Outcome.RETRY

    def test_is_given_up_where_the_handler_rejects_it_or_skips(self, fifo):
        Handler(ordered=True).errors = [Reject("of no use")]
        assert deliver(key="A1").outcome is Outcome.DEAD_LETTER

    def test_body_that_does_not_fit_is_given_up_where_the_handler_skips(self, fifo):
        Handler(ordered=True, on_dead="skip")

        assert handle(group("cart"), delivery(Placed("A1"), body=b"{", key="A1")).outcome is Outcome.DEAD_LETTER


@pytest.mark.django_db(transaction=True)
class TestHook:
    def test_that_raises_after_the_commit_leaves_the_message_handled(self, caplog):
        @consumer(Placed, group="cart", retry=Retry(limit=0))
        def notify(message, context):
            CartEntry.objects.create(invoice=message.invoice, change=-1)
            transaction.on_commit(lambda: 1 / 0)

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.HANDLED
        assert CartEntry.objects.count() == Inbox.objects.count() == 1
        assert "a callback after its commit failed" in caplog.text
        assert not FailedDelivery.objects.exists()


@pytest.mark.django_db(transaction=True)
class TestConflict:
    def test_of_two_transactions_is_no_failure(self):
        """The handler updates a row that another transaction changed after its snapshot: SQLSTATE 40001."""
        entry = CartEntry.objects.create(invoice="shared", change=0)

        @consumer(Placed, group="cart", retry=Retry(limit=0))
        def add(message, context):
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '5s'")
                if not context.failures and conflicts:
                    conflicts.pop()
                    with database.connect("default") as other:
                        other.execute(f"UPDATE {CartEntry._meta.db_table} SET change = 5 WHERE id = %s", [entry.id])
            CartEntry.objects.filter(id=entry.id).update(change=7)

        conflicts = [1]
        connections["default"].close()
        wrapper = connections["default"]
        wrapper.settings_dict["OPTIONS"]["isolation_level"] = psycopg.IsolationLevel.REPEATABLE_READ
        try:
            first = handle(group("cart"), delivery(Placed("A1"), delivery_count=1))
            second = handle(group("cart"), delivery(Placed("A1"), delivery_count=2))
        finally:
            del wrapper.settings_dict["OPTIONS"]["isolation_level"]
            wrapper.close()

        assert (first.outcome, first.is_outage) == (Outcome.RETRY, False)
        assert first.after < SECOND
        assert second.outcome is Outcome.HANDLED
        assert not FailureCount.objects.filter(failures__gt=0).exists()


@pytest.mark.django_db(transaction=True)
class TestRestarts:
    def test_clean_ones_count_no_failure(self, broker, clock):
        """A worker is stopped in front of its messages, again and again; then each fails once."""
        handler = Handler(retry=Retry(limit=3, delays=[NO_WAIT], jitter=0))
        broker.send([outgoing(Placed(f"A{number}")) for number in range(6)])
        for _ in range(4):
            stopped = Worker(group("cart"), "default")
            receive = stopped._connected().receive

            def receive_and_stop(*arguments, stopped=stopped, receive=receive, **named):
                found = receive(*arguments, **named)
                stopped.stop()
                return found

            stopped._connected().receive = receive_and_stop
            assert stopped.step(NO_WAIT) == 6
            stopped.close()
        assert not handler.contexts
        handler.errors = [ValueError("once")] * 6

        worker = Worker(group("cart"), "default")
        worker.run(until_idle=True)

        assert (worker.counts.handled, worker.counts.dead_letters) == (6, 0)

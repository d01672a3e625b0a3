"""Deferred messages: what is written about a message that a group could not handle at once, and how it ends."""

import re
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.models import DurationField, ExpressionWrapper, F
from django.db.models.functions import Now
from msgspec.structs import replace

from outbox import Reject, RetryLater, RetryPolicy, consumer, database, signals
from outbox.consuming import deferred
from outbox.consuming.deferred import CRASH_LIMIT, Deferral, Reason
from outbox.consuming.deferred_housekeeping import tidy
from outbox.consuming.handle import defer, handle
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.outcome import RETRY_FOR_CODE, Outcome
from outbox.consuming.register import group
from outbox.consuming.run_deferred import run_deferred
from outbox.consuming.subscriptions import subscriptions_of
from outbox.message import Header
from outbox.models import Deferred, Duplicate, FailedDelivery, Inbox
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import applied, delivery, end_delays, numbered, run_due
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db

SECOND = timedelta(seconds=1)
ID = "0b2504e0-4f89-11d3-9a0c-0305e82c3309"
OURS = {Header.SOURCE: "urn:uuid:4f89"}


class Handler:
    """Raises the errors that it is given, one after the other, then applies; knows its contexts."""

    def __init__(self, *errors: BaseException, **options) -> None:
        self.errors = list(errors)
        self.contexts = []
        consumer(Placed, group="cart", **{"retry": RetryPolicy(limit=2, delays=[SECOND], jitter=0)} | options)(self.handle)

    def handle(self, message, context) -> None:
        self.contexts.append(context)
        CartEntry.objects.create(invoice=message.invoice, change=-1)
        if self.errors:
            raise self.errors.pop(0)


def deliver(invoice: str = "A1", *, named: str = "", key: str = "", delivery_count: int = 1, **more) -> Outcome:
    arrived = delivery(Placed(invoice), named=named, key=key, delivery_count=delivery_count, **more)
    return handle(group("cart"), arrived).outcome


def begin_and_die() -> None:
    """Begin a run of the only deferred message, and never end it."""
    end_delays()
    assert deferred.take("cart", subscriptions_of(group("cart")), "default", may_doubt=True)


def due_in() -> timedelta:
    """Return the time until the only deferred message is due."""
    left = ExpressionWrapper(F("due_at") - Now(), output_field=DurationField())
    return Deferred.objects.annotate(left=left).get().left


class TestFailedMessage:
    def test_is_stored_as_it_came(self):
        Handler(ValueError("no"))
        arrived = delivery(Placed("A1"), key="A1", headers=numbered(7) | {"who": "Zoë\x00"}, tag="placed")

        assert handle(group("cart"), arrived).outcome is Outcome.DEFERRED

        row = Deferred.objects.get()
        assert (row.consumer_group, str(row.message_id), row.own_id) == ("cart", arrived.message_id, arrived.message_id)
        assert (row.topic, row.type, row.tag, row.key, row.order_key) == ("orders", "tests.Placed", "placed", "A1", None)
        assert (bytes(row.body), row.lane, row.number) == (arrived.body, 1, 7)
        assert (row.reason, row.failures, row.crashes, row.runs) == ("failed", 1, 0, 0)
        assert row.error == "ValueError: no"

    def test_is_stored_as_it_came_where_strings_have_escapes(self):
        connection.cursor().execute("SET LOCAL standard_conforming_strings = off")
        Handler(ValueError())
        deliver()

        assert bytes(Deferred.objects.get().body) == delivery(Placed("A1")).body

    def test_is_handled_as_it_came_when_its_delay_is_over(self):
        handler = Handler(ValueError("no"))
        arrived = delivery(Placed("A1"), key="A1", headers=numbered(7) | {"who": "Zoë\x00"}, delivery_count=1)
        handle(group("cart"), arrived)

        early = run_due()
        end_delays()
        late = run_due()

        assert (early, late) == ([], [Outcome.HANDLED])
        first, second = handler.contexts
        assert replace(second, delivery_count=1, failures=0) == first
        assert (second.delivery_count, second.failures) == (2, 1)
        assert applied() == ["A1"]
        assert not Deferred.objects.exists()
        row = Inbox.objects.get()
        assert (str(row.message_id), row.lane, row.number, row.delivery_count) == (arrived.message_id, 1, 7, 2)

    @pytest.mark.parametrize(
        ("error", "outcome"), [(ValueError("no"), Outcome.DEFERRED), (Reject("of no use"), Outcome.DEAD_LETTER)]
    )
    def test_is_dropped_when_it_comes_again(self, error, outcome):
        Handler(error)

        outcomes = [deliver(named=ID), deliver(named=ID, delivery_count=2)]

        assert outcomes == [outcome, Outcome.DUPLICATE]
        assert Deferred.objects.get().crashes == 0
        assert Duplicate.objects.count() == 1

    def test_is_a_dead_letter_after_its_limit(self, dead_lettered):
        Handler(*[ValueError("no")] * 3)

        deliver(named=ID)
        for _ in range(2):
            end_delays()
            run_due()

        row = Deferred.objects.get()
        assert (row.failures, row.dead_at is None) == (3, False)
        assert [failed.outcome for failed in FailedDelivery.objects.order_by("id")] == ["retry", "retry", "dead letter"]
        assert [said["message_id"] for said in dead_lettered] == [ID]
        end_delays()
        assert run_due() == []

    @pytest.mark.django_db(transaction=True)
    def test_has_aware_times_where_django_has_naive_ones(self, settings):
        settings.USE_TZ = False
        connection.close()
        handler = Handler(ValueError("no"))
        try:
            deliver(stored_at=datetime(2026, 7, 1, 12, tzinfo=UTC))
            end_delays()
            run_due()
        finally:
            connection.close()

        assert [context.stored_at for context in handler.contexts] == [datetime(2026, 7, 1, 12, tzinfo=UTC)] * 2

    def test_costs_a_first_delivery_no_statement(self, django_assert_num_queries):
        Handler()

        with django_assert_num_queries(4):  # savepoint, claim, the handler's own, release
            deliver()


class TestManyMessages:
    def test_are_stored_in_slices_since_postgresql_refuses_a_statement_of_a_gigabyte(self, monkeypatch):
        Handler()
        deliver("A3", named=ID)
        deliveries = [delivery(Placed(f"A{number}"), named=ID if number == 3 else "") for number in range(5)]
        monkeypatch.setattr(deferred, "SLICE_BYTES", 2 * len(deliveries[0].body))
        # The server divides by zero where a statement has more than two messages, in place of refusing a gigabyte.
        refused = "WHERE 1 / (cardinality(%(own_id)s::text[]) < 3)::int = 1"
        monkeypatch.setattr(deferred, "DEFER", f"{deferred.DEFER} {refused}")

        results = defer(group("cart"), [(one, Deferral.unhandled(Reason.STOP, one)) for one in deliveries])

        assert [result.outcome for result in results] == [Outcome.DEFERRED] * 3 + [Outcome.DUPLICATE, Outcome.DEFERRED]
        assert [row.own_id for row in Deferred.objects.order_by("id")] == [
            one.message_id for one in deliveries if one.message_id != ID
        ]


class TestEnd:
    @pytest.mark.parametrize(
        ("error", "failures", "seconds", "is_dead"),
        [
            (ValueError("no"), 1, 1, False),
            (RetryLater(60), 0, 60, False),
            (RetryLater(timedelta(days=4000)), 0, 365 * 86400, False),
            (Reject("of no use"), 0, 0, True),
            (SystemExit(3), 1, 1, False),
        ],
    )
    def test_of_a_first_delivery(self, error, failures, seconds, is_dead):
        Handler(error)

        deliver()

        row = Deferred.objects.get()
        assert (row.failures, row.crashes, row.dead_at is not None) == (failures, 0, is_dead)
        assert timedelta(seconds=seconds - 5) < due_in() <= timedelta(seconds=seconds)

    def test_of_a_run_leaves_the_failures_where_the_handler_asked_for_it(self):
        Handler(ValueError("1"), *[RetryLater(1)] * 5)
        deliver()

        for _ in range(5):
            end_delays()
            run_due()

        row = Deferred.objects.get()
        assert (row.failures, row.crashes, row.runs) == (1, 0, 5)

    def test_of_a_message_without_an_id_is_a_dead_letter_that_runs_once_when_it_is_replayed(self):
        handler = Handler()
        arrived = replace(delivery(Placed("A1")), message_id="", queue="q", pos=7)

        outcomes = [handle(group("cart"), arrived).outcome for _ in range(2)]
        Deferred.objects.update(dead_at=None)

        assert outcomes == [Outcome.DEAD_LETTER, Outcome.DUPLICATE]
        assert run_due() == [Outcome.HANDLED]
        assert len(handler.contexts) == 1

    def test_of_a_message_of_a_newer_version_waits_for_its_code(self):
        Handler()

        deliver(body=b'{"no": 1}', headers={Header.VERSION: "3"})

        assert Deferred.objects.get().failures == 1
        assert due_in() > timedelta(seconds=50)
        Deferred.objects.update(failures=RETRY_FOR_CODE.limit)
        end_delays()
        assert run_due() == [Outcome.DEAD_LETTER]

    def test_that_comes_late_changes_nothing(self):
        Handler(ValueError("no"))
        deliver()
        end_delays()
        stale = deferred.take("cart", subscriptions_of(group("cart")), "default", may_doubt=True)
        begin_and_die()

        assert deferred.end(stale, deferred.Deferral(deferred.Reason.FAILED, failures=7), "default") is False
        assert Deferred.objects.get().failures == 1

    def test_that_another_process_has_taken_over_changes_nothing(self):
        Handler(ValueError("no"))
        deliver()
        end_delays()
        stale = deferred.take("cart", subscriptions_of(group("cart")), "default", may_doubt=True)
        begin_and_die()

        with closing(LeaseThread()) as lease_thread:
            outcome = run_deferred(group("cart"), stale, lease_thread).outcome

        assert outcome is Outcome.DEFERRED
        row = Deferred.objects.get()
        assert (row.runs, row.crashes, row.failures) == (2, 2, 1)

    def test_of_a_message_that_the_inbox_has_deletes_the_row(self):
        handler = Handler(ValueError("no"))
        deliver(named=ID, headers=OURS)
        Inbox.objects.create(consumer_group="cart", idempotency_key="of its handler", message_id=UUID(ID), topic="orders")
        end_delays()

        assert run_due() == [Outcome.DUPLICATE]

        assert not Deferred.objects.exists()
        assert len(handler.contexts) == 1


class TestCrashes:
    def test_are_runs_that_were_begun_and_never_ended(self):
        handler = Handler()
        deliver(delivery_count=2)
        for _ in range(CRASH_LIMIT - 1):
            begin_and_die()
        end_delays()

        outcomes = run_due()

        assert outcomes == [Outcome.DEAD_LETTER]
        assert Deferred.objects.get().error.startswith("begun 5 times, never ended: ")
        assert not handler.contexts
        assert FailedDelivery.objects.get().fingerprint.startswith("NeverEnded")

    def test_are_forgotten_when_a_run_ends(self):
        Handler(ValueError("1"))
        deliver(delivery_count=2)
        begin_and_die()
        end_delays()

        run_due()

        row = Deferred.objects.get()
        assert (row.failures, row.crashes) == (1, 0)

    def test_are_no_message_of_a_process_that_has_another_one_in_doubt(self):
        Handler()
        deliver(delivery_count=2)

        taken = deferred.take("cart", subscriptions_of(group("cart")), "default", may_doubt=False)

        assert taken is None
        assert run_due() == [Outcome.HANDLED]

    def test_block_an_ordered_key_and_are_run_again(self, fifo, caplog):
        handler = Handler(retry=RetryPolicy(limit=0, delays=[SECOND], jitter=0))
        deliver(delivery_count=2, key="A1")
        for _ in range(CRASH_LIMIT - 1):
            begin_and_die()
        end_delays()

        blocked = run_due()
        waits = due_in()
        end_delays()

        assert (blocked, waits > timedelta(0)) == ([Outcome.DEFERRED], True)
        assert "holds back all later messages of the key 'A1'" in caplog.text
        assert run_due() == [Outcome.HANDLED]
        assert len(handler.contexts) == 1


@pytest.mark.usefixtures("fifo")
class TestOrderedKey:
    def test_waits_for_its_failed_message(self):
        Handler(ValueError("no"))

        outcomes = [deliver(invoice, key="A") for invoice in ("A1", "A2", "A3")]

        assert outcomes == [Outcome.DEFERRED] * 3
        assert applied() == []
        rows = list(Deferred.objects.order_by("id").values_list("reason", "due_at"))
        assert [(reason, due_at is None) for reason, due_at in rows] == [("failed", False), ("behind", True), ("behind", True)]

    def test_goes_on_in_its_order(self):
        Handler(ValueError("no"))
        for invoice in ("A1", "A2", "A3"):
            deliver(invoice, key="A")

        end_delays()

        assert run_due() == [Outcome.HANDLED] * 3
        assert applied() == ["A1", "A2", "A3"]
        assert deliver("A4", key="A") is Outcome.HANDLED

    def test_waits_for_its_failed_message_also_where_a_later_one_is_due(self):
        Handler(ValueError("no"), retry=RetryPolicy(limit=1, delays=[timedelta(hours=1)], jitter=0))
        deliver("A1", key="A")
        deliver("A2", key="A")

        Deferred.objects.filter(due_at=None).update(due_at=Now())

        assert run_due() == []

    def test_leaves_other_keys_alone(self):
        Handler(ValueError("no"))

        outcomes = [deliver("A1", key="A"), deliver("B1", key="B"), deliver("A2", key="A"), deliver("C1")]

        assert outcomes == [Outcome.DEFERRED, Outcome.HANDLED, Outcome.DEFERRED, Outcome.HANDLED]

    def test_goes_on_behind_a_dead_letter(self):
        Handler(Reject("of no use"))

        outcomes = [deliver("A1", key="A"), deliver("A2", key="A")]

        assert outcomes == [Outcome.DEAD_LETTER, Outcome.HANDLED]

    def test_wakes_its_next_message_when_one_becomes_a_dead_letter(self):
        Handler(ValueError("no"), Reject("of no use"))
        for invoice in ("A1", "A2"):
            deliver(invoice, key="A")
        end_delays()

        assert run_due() == [Outcome.DEAD_LETTER, Outcome.HANDLED]

    def test_is_woken_by_the_sweep_where_a_process_died_before_it_woke_it(self):
        Handler(ValueError("no"))
        for invoice in ("A1", "A2"):
            deliver(invoice, key="A")
        Deferred.objects.order_by("id").first().delete()
        assert run_due() == []

        deferred.sweep("default")

        assert run_due() == [Outcome.HANDLED]
        assert applied() == ["A2"]

    def test_knows_a_message_that_is_deferred(self):
        """A process that stood still claims a message that another one has deferred and given up."""
        handler = Handler(Reject("of no use"))
        deliver("A1", key="A", named=ID)

        outcome = deliver("A1", key="A", named=ID)

        assert outcome is Outcome.DUPLICATE
        assert len(handler.contexts) == 1

    @pytest.mark.parametrize("make", [lambda: {"headers": {Header.TYPE: "OrderFrobbed"}}, lambda: {"body": b"{"}])
    def test_is_held_by_what_cannot_be_handled_where_it_blocks(self, make):
        Handler()

        assert deliver(key="A", **make()) is Outcome.DEFERRED
        assert deliver("A2", key="A") is Outcome.DEFERRED

    def test_goes_on_when_an_unreadable_message_is_discarded_as_the_alert_says(self, caplog):
        Handler()
        deliver(named=ID, key="A", body=b"{")
        deliver("A2", key="A")

        [command] = re.findall(r"discard the message with (outbox_replay --discard)", caplog.text)
        call_command(*command.split(), ID, "--no-input")

        assert run_due() == [Outcome.HANDLED]
        assert applied() == ["A2"]

    def test_may_be_longer_than_an_index_entry(self):
        Handler(ValueError("no"))
        key = "ключ" * 2000

        outcomes = [deliver(invoice, key=key) for invoice in ("A1", "A2")]
        end_delays()

        assert outcomes == [Outcome.DEFERRED] * 2
        assert Deferred.objects.first().order_key.startswith("sha256:")
        assert run_due() == [Outcome.HANDLED] * 2


class TestOwnIdempotencyKey:
    def test_finds_a_copy_of_a_discarded_message(self):
        handler = Handler(Reject("of no use"), idempotency_key=lambda message: message.invoice)
        deliver(named=ID, headers=OURS)
        Deferred.objects.all().delete()
        Inbox.objects.create(consumer_group="cart", idempotency_key=ID, message_id=UUID(ID), topic="orders", delivery_count=0)

        outcome = deliver(named=ID, headers=OURS)

        assert outcome is Outcome.DUPLICATE
        assert len(handler.contexts) == 1

    @pytest.mark.parametrize("error", [ValueError("no"), Reject("of no use")], ids=["failed", "dead"])
    def test_keeps_a_deferred_message_when_a_copy_of_it_is_dropped(self, error):
        handler = Handler(error, idempotency_key=lambda message: message.invoice)
        deliver(named=ID, headers=numbered(1))

        outcome = deliver(named=ID, headers=numbered(1))  # published twice

        assert outcome is Outcome.DUPLICATE
        tidy("default")
        Deferred.objects.update(dead_at=None)
        end_delays()
        assert run_due() == [Outcome.HANDLED]
        assert (len(handler.contexts), applied()) == (2, ["A1"])

    def test_ends_a_deferred_message_whose_like_was_handled_meanwhile(self):
        handler = Handler(ValueError("no"), idempotency_key=lambda message: message.invoice)
        first = deliver(headers=numbered(1))
        second = deliver(headers=numbered(2))
        end_delays()

        assert (first, second, run_due()) == (Outcome.DEFERRED, Outcome.HANDLED, [Outcome.DUPLICATE])
        assert len(handler.contexts) == 2
        assert sorted(Inbox.objects.values_list("number", flat=True)) == [1, 2]


@pytest.mark.django_db(transaction=True)
class TestTransaction:
    def test_whose_hook_raises_after_the_commit_leaves_the_message_handled(self, caplog):
        @consumer(Placed, group="cart", retry=RetryPolicy(limit=0))
        def notify(message, context):
            CartEntry.objects.create(invoice=message.invoice, change=-1)
            transaction.on_commit(lambda: 1 / 0)

        outcomes = [deliver(), deliver(delivery_count=2), *run_due()]

        assert outcomes == [Outcome.HANDLED, Outcome.DEFERRED, Outcome.HANDLED]
        assert CartEntry.objects.count() == Inbox.objects.count() == 2
        assert "a callback after its commit failed" in caplog.text
        assert not FailedDelivery.objects.exists()

    def test_that_holds_a_row_hides_only_that_row_from_the_sweep(self, fifo):
        Handler(ValueError("no"), ValueError("no"))
        for invoice in ("A1", "A2", "B1", "B2"):
            deliver(invoice, key=invoice[0])
        heads = Deferred.objects.filter(due_at__isnull=False)
        heads.delete()
        locked, free = Deferred.objects.order_by("id")

        with database.connect("default") as other, other.transaction():
            other.execute("SELECT FROM outbox_deferred WHERE id = %s FOR UPDATE", [locked.id])
            deferred.sweep("default")

        assert Deferred.objects.get(due_at__isnull=False) == free

    def test_that_met_a_conflict_is_no_failure(self):
        """The handler updates a row that another transaction changed after its snapshot: SQLSTATE 40001."""
        entry = CartEntry.objects.create(invoice="shared", change=0)

        @consumer(Placed, group="cart", retry=RetryPolicy(limit=0))
        def add(message, context):
            if conflicts:
                conflicts.pop()
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1")
                with database.connect("default") as other:
                    other.execute(f"UPDATE {CartEntry._meta.db_table} SET change = 5 WHERE id = %s", [entry.id])
            CartEntry.objects.filter(id=entry.id).update(change=7)

        conflicts = [1, 2]
        connections["default"].close()
        wrapper = connections["default"]
        wrapper.settings_dict["OPTIONS"]["isolation_level"] = psycopg.IsolationLevel.REPEATABLE_READ
        try:
            outcomes = [deliver()]
            end_delays()
            outcomes += run_due()
            row = Deferred.objects.get()
            end_delays()
            outcomes += run_due()
        finally:
            del wrapper.settings_dict["OPTIONS"]["isolation_level"]
            wrapper.close()

        assert outcomes == [Outcome.DEFERRED, Outcome.DEFERRED, Outcome.HANDLED]
        assert (row.failures, row.crashes, row.runs) == (0, 0, 1)

    def test_keeps_the_message_until_its_failure_is_written(self, monkeypatch):
        Handler(ValueError("1"), ValueError("2"))
        deliver()
        end_delays()
        end, free = deferred.end, []

        def look_and_end(*arguments):
            with database.connect("default") as other:
                free.extend(other.execute("SELECT id FROM outbox_deferred FOR UPDATE SKIP LOCKED").fetchall())
            return end(*arguments)

        monkeypatch.setattr(deferred, "end", look_and_end)

        assert run_due() == [Outcome.DEFERRED]
        assert free == []
        assert Deferred.objects.get().failures == 2

    def test_whose_listener_breaks_the_database_is_a_dead_letter(self):
        heard = []

        def break_database(**said):
            heard.append(said["message_id"])
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / 0")

        Handler(ValueError("1"), ValueError("2"), retry=RetryPolicy(limit=1))
        deliver(named=ID)
        end_delays()
        signals.dead_lettered.connect(break_database, weak=False, dispatch_uid="test")
        try:
            taken = deferred.take("cart", subscriptions_of(group("cart")), "default", may_doubt=True)
            with closing(LeaseThread()) as lease_thread:
                outcome = run_deferred(group("cart"), taken, lease_thread).outcome
        finally:
            signals.dead_lettered.disconnect(dispatch_uid="test")

        row = Deferred.objects.get()
        assert (outcome, row.dead_at is None, row.failures) == (Outcome.DEAD_LETTER, False, 2)
        assert heard == [ID]

    def test_that_the_server_ended_is_run_again_and_no_failure(self):
        @consumer(Placed, group="cart")
        def end_session(message, context):
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

        deliver(delivery_count=2)
        taken = deferred.take("cart", subscriptions_of(group("cart")), "default", may_doubt=True)

        with closing(LeaseThread()) as lease_thread:
            outcome = run_deferred(group("cart"), taken, lease_thread).outcome

        assert outcome is Outcome.RELEASED
        row = Deferred.objects.get()
        assert (row.failures, row.crashes) == (0, 2)
        deferred.end_late([(taken.id, taken.runs)], "default")
        assert Deferred.objects.get().crashes == 0

import asyncio
from contextlib import nullcontext
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group as UniqueRow
from django.db import IntegrityError, connection, transaction
from msgspec.structs import replace

import outbox
from outbox import Reject, RetryPolicy, consumer
from outbox.consuming.delivery_info import as_key
from outbox.consuming.handle import handle
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import group
from outbox.message import Cause, Header, current_cause
from outbox.models import Duplicate, FailedDelivery, Inbox, MessageRow
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import delivery, errors, numbered
from tests.outbox.consuming.messages import Cancelled, Ignored, Placed

pytestmark = pytest.mark.django_db


def clears_the_cart(**options):
    @consumer(Placed, group="cart", **options)
    def clear_cart(message, context):
        CartEntry.objects.create(invoice=message.invoice, change=-message.items)

    return clear_cart


def fails_with(error: Exception, **options):
    @consumer(Placed, group="cart", **options)
    def fail(message, context):
        CartEntry.objects.create(invoice=message.invoice, change=-1)
        raise error


@pytest.mark.django_db(transaction=True)
class TestADurableBlockInAHandler:
    def test_is_named_at_the_first_delivery_with_the_way_out(self):
        @consumer(Placed, group="cart")
        def clear_cart(message, context):
            with transaction.atomic(durable=True):
                CartEntry.objects.create(invoice=message.invoice, change=-1)

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEFERRED
        error = FailedDelivery.objects.get().error
        assert error.startswith("NotOutermost: ")
        assert "clear_cart entered atomic(durable=True)" in error
        assert "Use atomic() there" in error

    def test_leaves_another_runtime_error_as_it_is(self):
        fails_with(RuntimeError("no such customer"))

        handle(group("cart"), delivery(Placed("A1")))

        assert FailedDelivery.objects.get().error == "RuntimeError: no such customer"


class TestHandled:
    def test_applies_the_writes_and_the_inbox_row(self):
        clears_the_cart()
        arrived = delivery(Placed("A1", items=3), headers=numbered(7, lane=2))

        result = handle(group("cart"), arrived)

        assert result.outcome is Outcome.HANDLED
        assert CartEntry.objects.get().change == -3
        row = Inbox.objects.get()
        assert (row.consumer_group, str(row.message_id), row.topic) == ("cart", arrived.message_id, "orders")
        assert (row.source, row.lane, row.number) == (arrived.headers[Header.SOURCE], 2, 7)

    def test_tells_the_handler_what_came(self):
        seen = []
        consumer(Placed, group="cart")(lambda message, context: seen.append((message, context)))
        arrived = delivery(Placed("A1"), key="A1", headers=numbered(7))

        handle(group("cart"), arrived)

        message, context = seen[0]
        assert message == Placed("A1")
        assert (context.message_id, context.group, context.topic) == (arrived.message_id, "cart", "orders")
        assert (context.key, context.tag, context.delivery_count, context.lane, context.number) == ("A1", "placed", 1, 1, 7)
        assert context.idempotency_key == f"cart:{arrived.message_id}"

    def test_takes_another_producers_message_id(self):
        clears_the_cart()

        outcomes = [handle(group("cart"), delivery(Placed("A1"), named="not-a-uuid")).outcome for _ in range(2)]

        assert outcomes == [Outcome.HANDLED, Outcome.DUPLICATE]
        assert CartEntry.objects.count() == 1

    def test_drives_an_async_handler_in_the_transaction(self):
        @consumer(Placed, group="cart")
        async def clear_cart(message, context):
            await CartEntry.objects.acreate(invoice=message.invoice, change=-1)
            raise Reject("after all not")

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEAD_LETTER
        assert not CartEntry.objects.exists()

    def test_drives_an_async_method(self):
        @consumer(Placed, group="cart")
        class ClearCart:
            async def handle(self, message, context):
                await CartEntry.objects.acreate(invoice=message.invoice, change=-1)

        assert handle(group("cart"), delivery(Placed("A1"))).outcome is Outcome.HANDLED
        assert CartEntry.objects.count() == 1

    @pytest.mark.parametrize("kind", ["coroutine", "generator", "async_generator", "map", "Future"])
    def test_does_not_take_for_work_that_is_done_what_has_not_run(self, kind):
        async def coroutine(message):
            await CartEntry.objects.acreate(invoice=message.invoice, change=-1)

        def generator(message):
            yield CartEntry.objects.create(invoice=message.invoice, change=-1)

        async def async_generator(message):
            yield await CartEntry.objects.acreate(invoice=message.invoice, change=-1)

        work = {
            "coroutine": coroutine,
            "generator": generator,
            "async_generator": async_generator,
            "map": lambda message: map(CartEntry.objects.create, [message]),
            "Future": lambda message: asyncio.Future(loop=asyncio.new_event_loop()),
        }[kind]
        consumer(Placed, group="cart", retry=RetryPolicy(limit=0))(lambda message, context: work(message))

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEAD_LETTER
        assert f"returned a {kind}, whose code has not run" in errors()[0]
        assert not Inbox.objects.exists()

    def test_upgrades_an_older_body(self):
        clears_the_cart()
        arrived = delivery(Placed(""), body=b'{"number": "A1"}', headers={Header.VERSION: "1"})

        handle(group("cart"), arrived)

        assert CartEntry.objects.get().invoice == "A1"

    def test_gives_a_plain_topic_its_json_or_bytes(self):
        seen = []
        consumer(topic="plain", group="cart")(lambda message, context: seen.append(message))
        json = delivery(Placed(""), topic="plain", body=b'{"a": 1}', headers={Header.TYPE: ""})
        octets = replace(json, message_id="2", body=b"\xff", headers={})

        handle(group("cart"), json)
        handle(group("cart"), octets)

        assert seen == [{"a": 1}, b"\xff"]

    def test_refuses_to_run_inside_a_transaction(self, transactional_db, caplog):
        clears_the_cart()

        with transaction.atomic():
            result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.RELEASED
        assert "durable" in caplog.text
        assert not CartEntry.objects.exists()


class TestDuplicate:
    def test_applies_a_message_delivered_three_times_once(self):
        clears_the_cart()
        arrived = delivery(Placed("A1"))

        outcomes = [handle(group("cart"), replace(arrived, delivery_count=n)).outcome for n in (1, 2, 3)]

        assert outcomes == [Outcome.HANDLED, Outcome.DUPLICATE, Outcome.DUPLICATE]
        assert CartEntry.objects.count() == 1
        assert list(Duplicate.objects.order_by("id").values_list("consumer_group", "delivery_count")) == [
            ("cart", 2),
            ("cart", 3),
        ]

    def test_is_for_one_group_only(self):
        clears_the_cart()
        consumer(Placed, group="points")(lambda message, context: CartEntry.objects.create(invoice="p", change=1))
        arrived = delivery(Placed("A1"))

        handle(group("cart"), arrived)
        other = handle(group("points"), replace(arrived, group="points"))

        assert other.outcome is Outcome.HANDLED

    def test_goes_by_the_handlers_own_key(self):
        clears_the_cart(idempotency_key=lambda message: message.invoice)

        outcomes = [
            handle(group("cart"), delivery(Placed(invoice), headers=numbered(n))).outcome
            for n, invoice in enumerate(["A1", "A1", "A2"], start=1)
        ]

        assert outcomes == [Outcome.HANDLED, Outcome.DUPLICATE, Outcome.HANDLED]
        assert sorted(Inbox.objects.values_list("number", flat=True)) == [1, 2, 3]

    def test_writes_no_second_number_for_a_message_redelivered_under_its_own_key(self):
        clears_the_cart(idempotency_key=lambda message: message.invoice)
        arrived = delivery(Placed("A1"), headers=numbered(1))

        outcomes = [handle(group("cart"), arrived).outcome for _ in range(2)]

        assert outcomes == [Outcome.HANDLED, Outcome.DUPLICATE]
        assert Inbox.objects.count() == 1

    def test_keeps_own_keys_of_two_handlers_apart(self):
        clears_the_cart(idempotency_key=lambda message: message.invoice)
        consumer(Cancelled, group="cart", idempotency_key=lambda message: message.invoice)(lambda message, context: None)

        handle(group("cart"), delivery(Placed("A1")))
        result = handle(group("cart"), delivery(Cancelled("A1")))

        assert result.outcome is Outcome.HANDLED


class TestPassedOver:
    def test_writes_the_number_of_a_message_that_no_handler_takes(self):
        clears_the_cart()

        results = [handle(group("cart"), delivery(Ignored(), headers=numbered(5))) for _ in range(2)]

        assert {result.outcome for result in results} == {Outcome.IGNORED}
        assert set(Inbox.objects.values_list("number", flat=True)) == {5}

    def test_leaves_other_tags_alone(self):
        clears_the_cart(tags={"wholesale"})

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.IGNORED
        assert not CartEntry.objects.exists()


class TestHandlerOfAnotherDatabase:
    @pytest.mark.django_db(databases=["default", "other"])
    @pytest.mark.parametrize("opens_a_block", [False, True])
    def test_publishes_in_its_own_transaction(self, opens_a_block):
        @consumer(Placed, group="cart", using="other")
        def clear_cart(message, context):
            with outbox.atomic() if opens_a_block else nullcontext():
                outbox.publish_raw("orders", {"n": 1})

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.HANDLED
        assert MessageRow.objects.using("other").count() == 1
        assert MessageRow.objects.count() == 0


class TestFailure:
    def test_rolls_back_the_writes_with_the_inbox_row(self):
        fails_with(ValueError("no"))

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEFERRED
        assert not CartEntry.objects.exists()
        assert not Inbox.objects.exists()

    def test_is_written_down(self):
        fails_with(ValueError("order 4711 of 3f2504e0-4f89-11d3-9a0c-0305e82c3301\x00"))
        arrived = delivery(Placed("A1"), headers=numbered(9))

        handle(group("cart"), arrived)

        failed = FailedDelivery.objects.get()
        assert (failed.consumer_group, str(failed.message_id), failed.delivery_count) == ("cart", arrived.message_id, 1)
        assert (failed.lane, failed.number, failed.outcome) == (1, 9, "retry")
        assert failed.fingerprint == f"ValueError in {__name__}.fails_with.<locals>.fail: order # of #\\x00"
        assert "raise error" in failed.traceback

    def test_gives_up_at_once_on_reject(self):
        fails_with(Reject("a total of 0"))

        result = handle(group("cart"), delivery(Placed("A1")))

        assert (result.outcome, errors()) == (Outcome.DEAD_LETTER, ["a total of 0"])
        assert not CartEntry.objects.exists()
        assert not Inbox.objects.exists()
        assert FailedDelivery.objects.get().outcome == "dead letter"

    def test_gives_a_reason_that_the_database_can_store(self):
        fails_with(Reject("a \x00 and half of \ud83d"))

        handle(group("cart"), delivery(Placed("A1")))

        assert errors() == [r"a \x00 and half of \ud83d"]

    def test_gives_up_at_once_on_an_error_that_the_policy_does_not_name(self):
        fails_with(ValueError("no"), retry=RetryPolicy(on=(OSError,)))

        assert handle(group("cart"), delivery(Placed("A1"))).outcome is Outcome.DEAD_LETTER

    def test_of_an_integrity_error_is_a_retry_like_any(self):
        UniqueRow.objects.create(name="taken")
        consumer(Placed, group="cart")(lambda message, context: UniqueRow.objects.create(name="taken"))

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEFERRED
        assert FailedDelivery.objects.get().fingerprint.startswith("IntegrityError in ")

    def test_of_a_swallowed_database_error_is_seen(self):
        UniqueRow.objects.create(name="taken")

        @consumer(Placed, group="cart")
        def swallow(message, context):
            try:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1 / 0")
            except Exception:  # noqa: S110
                pass

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEFERRED
        assert "BrokenTransaction" in FailedDelivery.objects.get().error

    def test_of_a_broken_inner_block_is_seen(self):
        @consumer(Placed, group="cart")
        def swallow(message, context):
            CartEntry.objects.create(invoice="A1", change=-1)
            try:
                with transaction.atomic(savepoint=False):
                    raise ValueError("swallowed")
            except ValueError:
                pass

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEFERRED
        assert "BrokenTransaction" in FailedDelivery.objects.get().error

    def test_of_a_transaction_that_the_handler_has_rolled_back_is_seen(self):
        @consumer(Placed, group="cart")
        def undo(message, context):
            CartEntry.objects.create(invoice="A1", change=-1)
            transaction.set_rollback(True)

        result = handle(group("cart"), delivery(Placed("A1")))

        assert result.outcome is Outcome.DEFERRED
        assert not CartEntry.objects.exists()
        assert "BrokenTransaction" in FailedDelivery.objects.get().error

    def test_of_a_savepoint_is_the_handlers_own_affair(self):
        UniqueRow.objects.create(name="taken")

        @consumer(Placed, group="cart")
        def survive(message, context):
            try:
                with transaction.atomic():
                    UniqueRow.objects.create(name="taken")
            except IntegrityError:
                CartEntry.objects.create(invoice="A1", change=0)

        assert handle(group("cart"), delivery(Placed("A1"))).outcome is Outcome.HANDLED
        assert CartEntry.objects.exists()


@pytest.mark.usefixtures("fifo")
class TestOrdered:
    def test_blocks_its_key_with_an_alert_once_the_retries_are_used_up(self, alerts):
        fails_with(ValueError("no"), retry=RetryPolicy(limit=0, delays=[timedelta(minutes=5)]))

        result = handle(group("cart"), delivery(Placed("A1"), key="A1"))

        assert result.outcome is Outcome.DEFERRED
        assert "holds back all later messages of the key 'A1'" in alerts[0]["reason"]

    def test_skips_where_the_handler_says_so(self):
        fails_with(ValueError("no"), on_dead="skip", retry=RetryPolicy(limit=0))

        assert handle(group("cart"), delivery(Placed("A1"))).outcome is Outcome.DEAD_LETTER


class TestCause:
    def test_is_the_message_while_its_handler_runs(self):
        seen = []
        consumer(Placed, group="cart")(lambda message, context: seen.append(current_cause.get()))
        first = delivery(Placed("A1"))
        second = delivery(Placed("A1"), headers={Header.CORRELATION_ID: "story", Header.TRACEPARENT: "00-a-b-01"})

        handle(group("cart"), first)
        handle(group("cart"), second)

        assert seen == [Cause(first.message_id, first.message_id), Cause(second.message_id, "story", "00-a-b-01")]
        assert current_cause.get() is None

    def test_is_short_where_another_program_writes_long_texts(self):
        seen = []
        consumer(Placed, group="cart")(lambda message, context: seen.append(current_cause.get()))
        long = "x" * 100_000
        headers = {Header.CORRELATION_ID: long, Header.TRACEPARENT: long}

        handle(group("cart"), delivery(Placed("A1"), named=long, headers=headers))

        assert seen == [Cause(as_key(long), as_key(long), as_key(long))]
        assert len(as_key(long)) < 100

    def test_is_forgotten_after_a_failure(self):
        fails_with(ValueError("no"))

        handle(group("cart"), delivery(Placed("A1")))

        assert current_cause.get() is None


class TestUsing:
    @pytest.mark.django_db(databases=["default", "other"])
    def test_puts_the_inbox_row_beside_the_writes(self):
        @consumer(Placed, group="cart", using="other")
        def clear_cart(message, context):
            CartEntry.objects.using("other").create(invoice=message.invoice, change=-1)

        arrived = delivery(Placed("A1"))
        outcomes = [handle(group("cart"), arrived).outcome for _ in range(2)]

        assert outcomes == [Outcome.HANDLED, Outcome.DUPLICATE]
        assert Inbox.objects.using("other").count() == CartEntry.objects.using("other").count() == 1
        assert Duplicate.objects.using("other").count() == 1
        assert not Inbox.objects.exists()

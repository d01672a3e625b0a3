from contextlib import suppress

import pytest
from django.contrib.auth.models import Group, Permission
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, transaction
from django.db.transaction import TransactionManagementError

from outbox import Message, Reject, RetryLater, publish
from outbox import atomic as outbox_atomic
from outbox.consuming import register
from outbox.models import Inbox
from tests.outbox.publishing.rows import OrderMade, ParcelMoved
from tests.outbox.testing.orders import ORDER, commit

pytestmark = pytest.mark.usefixtures("own_topics")


class TestRunUntilIdle:
    def test_takes_messages_to_their_handlers(self, outbox, handled):
        seen = handled(OrderMade)
        commit()

        ran = outbox.run_until_idle()

        assert seen == [ORDER]
        assert (ran.sent, ran.deliveries.handled) == (1, 1)

    def test_takes_what_handlers_publish_on(self, outbox, handled):
        handled(OrderMade, lambda order: publish(ParcelMoved(parcel="A")))
        moved = handled(ParcelMoved, group="parcels")
        commit()

        outbox.run_until_idle()

        assert moved == [ParcelMoved(parcel="A")]

    def test_does_nothing_where_nothing_waits(self, outbox, handled):
        handled(OrderMade)

        ran = outbox.run_until_idle()

        assert (ran.sent, ran.deliveries.handled) == (0, 0)

    def test_keeps_the_order_of_a_key(self, outbox, handled):
        seen = handled(ParcelMoved)
        for place in range(5):
            commit(ParcelMoved(parcel="A", place=place))

        outbox.run_until_idle()

        assert [message.place for message in seen] == [0, 1, 2, 3, 4]

    def test_undoes_what_a_handler_did_that_failed(self, outbox, handled):
        def fail(order):
            Group.objects.create(name="staff")
            raise RuntimeError("no such thing")

        handled(OrderMade, fail)
        commit()

        outbox.run_until_idle(raise_errors=False)

        assert not Group.objects.exists()
        assert not Inbox.objects.exists()

    def test_tells_of_a_handlers_error(self, outbox, handled):
        handled(OrderMade, lambda order: 1 / 0)
        commit()

        with pytest.raises(AssertionError) as caught:
            outbox.run_until_idle()

        assert "failed over OrderMade(order_id=1, customer='Ann'): ZeroDivisionError: division by zero" in str(caught.value)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_tells_of_a_foreign_key_that_no_commit_would_take(self, outbox, handled):
        handled(OrderMade, lambda order: Permission.objects.create(content_type_id=0, codename="none", name="none"))
        commit()

        with pytest.raises(AssertionError, match=r"failed over OrderMade\(.*violates foreign key constraint") as caught:
            outbox.run_until_idle()

        assert isinstance(caught.value.__cause__, IntegrityError)
        assert not Permission.objects.filter(codename="none").exists()

    def test_leaves_it_to_the_consumer_to_name_an_error_that_the_handler_swallowed(self, outbox, handled):
        def swallow(order):
            with suppress(IntegrityError):
                Group.objects.create(name="staff")
                Group.objects.create(name="staff")

        handled(OrderMade, swallow)
        commit()

        with pytest.raises(AssertionError, match="returned with a broken transaction: it caught an error of the database"):
            outbox.run_until_idle()

    def test_blames_no_handler_for_what_the_test_itself_could_not_commit(self, outbox, handled):
        handled(OrderMade)
        commit()
        broken = Permission.objects.create(content_type_id=0, codename="none", name="none")

        with pytest.raises(IntegrityError):
            outbox.run_until_idle()
        broken.delete()

        assert outbox.run_until_idle().deliveries.handled == 1

    def test_leaves_constraints_deferred(self, outbox, handled):
        def handle(order):
            permission = Permission.objects.create(content_type_id=0, codename="none", name="none")
            permission.delete()

        seen = handled(OrderMade, handle)
        commit()
        commit()

        outbox.run_until_idle()

        assert len(seen) == 2

    @pytest.mark.parametrize("error", [Reject("never"), RetryLater(60)])
    def test_tells_of_none_that_the_handler_meant(self, outbox, handled, error):
        def mean_it(order):
            raise error

        handled(OrderMade, mean_it)
        commit()

        counts = outbox.run_until_idle().deliveries

        assert counts.deferred + counts.dead_letters == 1

    def test_tells_of_what_reached_no_handler(self, outbox, handled, monkeypatch):
        commit()
        monkeypatch.setattr("outbox.message.registered", {})  # the type is gone

        class OrderTold(Message):
            class Meta:
                topic = "made"

        handled(OrderTold)

        with pytest.raises(AssertionError, match=r"Group 'test' failed over message .*UnknownMessageType"):
            outbox.run_until_idle()

    def test_tells_of_handlers_that_keep_each_other_busy(self, outbox, handled, monkeypatch):
        monkeypatch.setattr("outbox.testing.kit.MAX_ROUNDS", 5)
        handled(OrderMade, lambda order: publish(order))
        commit()

        with pytest.raises(AssertionError, match=r"Not idle after 5 rounds. Does a handler .* last: OrderMade"):
            outbox.run_until_idle()

    def test_refuses_to_relay_what_is_not_committed(self, outbox):
        with outbox_atomic():
            publish(ORDER)
            with pytest.raises(AssertionError, match="A transaction of database 'default' is open in this test"):
                outbox.run_until_idle()

    @pytest.mark.django_db(transaction=True)
    def test_refuses_it_where_tests_commit_too(self, outbox):
        with outbox_atomic(), pytest.raises(AssertionError, match="is open in this test"):
            outbox.run_until_idle()

    def test_says_that_a_transaction_of_the_test_is_broken(self, outbox):
        with transaction.atomic():
            with pytest.raises(DatabaseError), transaction.atomic(savepoint=False):
                Group.objects.create(pk=2**40)  # more than its column holds

            with pytest.raises(TransactionManagementError):
                outbox.run_until_idle()

    def test_leaves_hooks_of_commits_to_django(self, outbox, handled, django_capture_on_commit_callbacks):
        called = []
        handled(OrderMade, lambda order: transaction.on_commit(lambda: called.append(order)))
        commit()

        with django_capture_on_commit_callbacks(execute=True) as callbacks:
            outbox.run_until_idle()

        assert len(callbacks) == 1
        assert called == [ORDER]

    @pytest.mark.django_db(databases=["default", "other"])
    def test_serves_each_database_of_the_test(self, outbox, handled):
        here, there = handled(OrderMade), handled(OrderMade, group="other", using="other")
        commit()
        with outbox_atomic("other"):
            publish(OrderMade(order_id=2))

        outbox.run_until_idle()

        assert [order.order_id for order in here] == [order.order_id for order in there] == [1, 2]
        assert Inbox.objects.using("other").count() == 2

    def test_leaves_alone_the_databases_of_other_tests(self, outbox, handled):
        here, there = handled(OrderMade), handled(OrderMade, group="other", using="other")
        commit()

        outbox.run_until_idle()

        assert (len(here), len(there)) == (1, 0)


class TestDeliver:
    def test_hands_a_message_to_its_consumers_without_publishing_it(self, outbox, handled):
        seen = handled(OrderMade)

        counts = outbox.deliver(ORDER, times=3)

        assert seen == [ORDER]
        assert (counts.handled, counts.duplicates) == (1, 2)
        outbox.assert_nothing_published()

    def test_hands_over_other_producers_messages(self, outbox):
        seen = []
        register.consumer(topic="made", group="raw")(lambda message, context: seen.append((message, context.key)))

        outbox.deliver_raw("made", {"lines": 3}, key="A")
        outbox.deliver_raw("made", b"lines;3")

        assert seen == [({"lines": 3}, "A"), (b"lines;3", "")]

    def test_hands_over_an_older_version(self, outbox, handled, monkeypatch):
        monkeypatch.setattr(OrderMade, "_upgrades", {2: lambda body: {"order_id": body["number"]}})
        seen = handled(OrderMade)

        outbox.deliver_raw("made", {"number": 1}, type_name="OrderMade", version=2)

        assert seen == [ORDER]

    def test_says_that_nobody_takes_it(self, outbox):
        with pytest.raises(AssertionError, match="No consumer handles OrderMade of topic 'made'"):
            outbox.deliver(ORDER)


class TestDeadLetters:
    def test_are_those_of_the_group(self, outbox, handled):
        def reject(order):
            raise Reject("no such order")

        handled(OrderMade, reject)
        outbox.deliver(ORDER)

        [letter] = outbox.dead_letters("test")
        assert "no such order" in letter.error
        assert outbox.dead_letters("another") == []


@pytest.mark.django_db(databases=[])
class TestATestWithoutADatabase:
    def test_is_told_what_it_needs(self, outbox):
        with pytest.raises(AssertionError, match="may not use any database with messages"):
            outbox.run_until_idle()


class TestAfterATestThatEmptiedTheTables:
    """Django does not migrate then, where a TransactionTestCase has `available_apps` or `serialized_rollback`."""

    @pytest.fixture
    def _emptied(self, transactional_db, outbox, handled):
        handled(OrderMade)
        commit()
        outbox.run_until_idle()
        call_command("flush", interactive=False, inhibit_post_migrate=True, verbosity=0)
        yield
        call_command("migrate", verbosity=0)  # what this project's other tests rely on

    @pytest.mark.usefixtures("_emptied")
    def test_takes_messages_to_their_handlers(self, outbox):
        commit()

        ran = outbox.run_until_idle()

        assert (ran.sent, ran.deliveries.handled) == (1, 1)

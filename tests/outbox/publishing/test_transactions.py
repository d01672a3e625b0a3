import asyncio

import pytest
from django.contrib.auth.models import Group
from django.db import connections, transaction
from django.db.models.signals import post_save
from django.test import TestCase, override_settings

from outbox import Envelope, apublish, publish, publish_many, publish_raw
from outbox import atomic as outbox_atomic
from outbox.errors import InvalidMessage, NotInTransaction, WrongDatabase
from tests.outbox.publishing.conftest import OUTBOX
from tests.outbox.publishing.rows import OrderMade, bodies, message_rows

BOTH = {"default", "other"}


@pytest.fixture
def no_transaction(django_db_setup, django_db_blocker):
    """Open the databases to a test that writes nothing: none of its own transaction, and no flush after it."""
    with django_db_blocker.unblock():
        yield
        connections.close_all()


@pytest.mark.usefixtures("no_transaction")
class TestOutsideATransaction:
    def test_publish_names_the_type_and_the_way_out(self):
        with pytest.raises(NotInTransaction) as caught:
            publish(OrderMade(order_id=1))

        assert str(caught.value) == (
            "OrderMade was published outside a transaction of database 'default', so nothing would tie it to the rows. "
            "Decorate the view or function with @transactional, or use `with outbox.atomic():`, around publish() and the "
            "statements that write the rows. In an on_commit() hook their transaction is over, and another thread does not share "
            "it; a receiver of post_save is in a transaction only if its caller has opened one."
        )

    def test_publish_raw_names_the_topic(self):
        with pytest.raises(NotInTransaction, match="A raw message to topic 'made' was published outside"):
            publish_raw("made", b"x")

    def test_publish_many_names_the_type(self):
        with pytest.raises(NotInTransaction, match="OrderMade was published outside"):
            publish_many([OrderMade(order_id=1)])

    def test_publish_names_the_transactions_that_are_open_elsewhere(self):
        with transaction.atomic(using="other"), pytest.raises(NotInTransaction) as caught:
            publish(OrderMade(order_id=1))

        assert "of database 'default'" in str(caught.value)
        assert "Transactions are open in: other. If the rows are there, pass using= or about=" in str(caught.value)
        assert "@transactional(using='default')" in str(caught.value)

    def test_publish_names_them_too_when_the_row_decided(self):
        group = Group(pk=7)
        group._state.db = "other"

        with (
            transaction.atomic(),
            pytest.raises(NotInTransaction, match=r"of database 'other'.*Transactions are open in: default"),
        ):
            publish(OrderMade(order_id=1), about=group)

    def test_publish_in_a_coroutine_names_apublish(self):
        async def main():
            publish(OrderMade(order_id=1))

        with pytest.raises(NotInTransaction, match=r"decorate the coroutine function .* `await apublish\(\.\.\.\)`"):
            asyncio.run(main())

    def test_apublish_raises_too(self):
        async def main():
            await apublish(OrderMade(order_id=1))

        with pytest.raises(NotInTransaction, match="OrderMade was published outside"):
            asyncio.run(main())

    def test_nothing_is_written(self):
        with pytest.raises(NotInTransaction):
            publish(OrderMade(order_id=1))

        assert message_rows() == message_rows("other") == []


@pytest.mark.django_db(transaction=True)
class TestPublishingWhenARowIsSaved:
    @pytest.fixture(autouse=True)
    def receiver(self):
        def publish_it(instance: Group, **_: object) -> None:
            publish(OrderMade(order_id=instance.pk), about=instance)

        post_save.connect(publish_it, sender=Group)
        yield
        post_save.disconnect(publish_it, sender=Group)

    def test_raises_without_a_transaction_after_the_row_was_committed(self):
        with pytest.raises(NotInTransaction):
            Group.objects.create(name="staff")

        assert Group.objects.filter(name="staff").exists()
        assert message_rows() == []

    def test_commits_both_in_a_transaction_around_it(self):
        with outbox_atomic():
            Group.objects.create(name="staff")

        assert Group.objects.filter(name="staff").exists()
        assert len(message_rows()) == 1


@pytest.mark.django_db(transaction=True, databases=BOTH)
class TestRowsOfAnotherDatabase:
    SUSPECTED = (
        "OrderMade is published to database 'default', whose transaction has run no statement yet, but a transaction of 'other' "
        "has. If the message's rows are there, pass about= or using=, because no transaction spans both databases."
    )

    @pytest.mark.parametrize(
        ("rows", "options", "is_suspected"),
        [
            (["other"], {}, True),
            (["default", "other"], {}, False),
            (["other"], {"using": "default"}, False),
            ([], {}, False),
        ],
    )
    def test_are_suspected_where_only_their_transaction_has_begun(self, caplog, rows, options, is_suspected):
        with transaction.atomic(), transaction.atomic(using="other"):
            for alias in rows:
                Group.objects.using(alias).create(name="staff")

            publish(OrderMade(order_id=1), **options)

        assert (self.SUSPECTED in caplog.text) == is_suspected


@pytest.mark.django_db(databases=BOTH)
class TestTheDatabase:
    def test_is_the_one_named(self):
        with transaction.atomic(using="other"):
            publish(OrderMade(order_id=1), using="other")

        assert (len(message_rows()), len(message_rows("other"))) == (0, 1)

    def test_is_that_of_the_row(self):
        group = Group.objects.using("other").create(name="staff")

        with transaction.atomic(), transaction.atomic(using="other"):
            publish(OrderMade(order_id=1), about=group)

        assert (len(message_rows()), len(message_rows("other"))) == (0, 1)

    def test_is_that_of_the_innermost_transaction_of_ours(self):
        with outbox_atomic(), outbox_atomic("other"):
            publish(OrderMade(order_id=1))

        assert (len(message_rows()), len(message_rows("other"))) == (0, 1)

    def test_is_that_of_the_outer_one_again_when_the_inner_has_ended(self):
        with outbox_atomic(), outbox_atomic("other"):
            pass
        with outbox_atomic():
            with outbox_atomic("other"):
                pass
            publish(OrderMade(order_id=1))

        assert (len(message_rows()), len(message_rows("other"))) == (1, 0)

    def test_is_else_that_of_the_routers(self, settings):
        settings.DATABASE_ROUTERS = ["tests.outbox.publishing.test_transactions.ToOther"]

        with transaction.atomic(using="other"):
            publish(OrderMade(order_id=1))
        with outbox_atomic() as alias:
            publish(OrderMade(order_id=2))

        assert alias == "other"
        assert (len(message_rows("default")), len(message_rows("other"))) == (0, 2)

    def test_cannot_be_another_than_that_of_the_row(self):
        group = Group.objects.using("other").create(name="staff")

        with transaction.atomic(), transaction.atomic(using="other"), pytest.raises(WrongDatabase) as caught:
            publish(OrderMade(order_id=1), about=group, using="default")

        assert str(caught.value) == (
            f"OrderMade would go to database 'default', but auth.group:{group.pk} lives in 'other'; no transaction spans "
            "both. Leave using= out, or publish about a row of that database."
        )

    def test_is_chosen_for_each_of_many(self, django_assert_num_queries):
        here = Group.objects.create(name="staff")
        there = Group.objects.using("other").create(name="staff")
        messages = [OrderMade(order_id=1), OrderMade(order_id=2), OrderMade(order_id=3)]

        with transaction.atomic(), transaction.atomic(using="other"):
            receipts = publish_many([Envelope(one, about=row) for one, row in zip(messages, (here, there, None), strict=True)])

        assert [body["order_id"] for body in bodies()] == [1, 3]
        assert [body["order_id"] for body in bodies("other")] == [2]
        assert [receipt.key for receipt in receipts] == ["1", "2", "3"]


class ToOther:
    def db_for_write(self, model, **hints):
        return "other" if model._meta.app_label == "outbox" else None

    def db_for_read(self, model, **hints):
        return None


@pytest.mark.django_db
class TestTheRowItIsAbout:
    def test_is_a_model_instance(self):
        with pytest.raises(InvalidMessage, match="OrderMade is about 7, which is not a model instance"):
            publish(OrderMade(order_id=1), about=7)  # type: ignore[arg-type]

    def test_is_saved(self):
        with pytest.raises(InvalidMessage, match=r"OrderMade is about a row of auth\.Group that has no primary key"):
            publish(OrderMade(order_id=1), about=Group(name="staff"))


@pytest.mark.django_db(transaction=True)
class TestARowThatWasReadFromAReplica:
    @pytest.fixture
    def row(self, settings):
        """A row of "default" that the router read from "other", its replica."""
        settings.DATABASE_ROUTERS = [WritesToDefault()]
        row = Group.objects.create(name="staff")
        row._state.db = "other"
        return row

    def test_goes_to_the_database_that_writes_go_to(self, row):
        with transaction.atomic():
            publish(OrderMade(order_id=row.pk), about=row)

        assert len(message_rows()) == 1

    def test_does_so_where_that_is_named(self, row):
        with transaction.atomic():
            publish(OrderMade(order_id=row.pk), about=row, using="default")

        assert len(message_rows()) == 1


class WritesToDefault:
    """Django's example of a router for a replica."""

    def db_for_write(self, model, **hints):
        return "default"


@pytest.mark.django_db
class TestTransaction:
    def test_rolls_back_on_an_exception(self):
        def fail():
            with outbox_atomic():
                publish(OrderMade(order_id=1))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()

        assert message_rows() == []

    def test_is_a_savepoint_in_another(self):
        with outbox_atomic():
            publish(OrderMade(order_id=1))
            with outbox_atomic():
                publish(OrderMade(order_id=2))
                transaction.set_rollback(True)

        assert [body["order_id"] for body in bodies()] == [1]

    @pytest.mark.django_db(transaction=True)
    def test_can_insist_on_being_the_outermost(self):
        with outbox_atomic(durable=True):
            publish(OrderMade(order_id=1))
        with transaction.atomic(), pytest.raises(RuntimeError, match="durable"), outbox_atomic(durable=True):
            pass

        assert len(message_rows()) == 1


@pytest.mark.django_db
class TestATestsOwnTransaction:
    def test_is_none_of_the_publisher(self):
        with pytest.raises(NotInTransaction) as caught:
            publish(OrderMade(order_id=1))

        assert "The transaction around this test does not count: in production it is not there." in str(caught.value)
        assert "or use `with outbox.atomic():`" in str(caught.value)
        assert message_rows() == []

    def test_is_not_said_to_be_open_elsewhere(self):
        with pytest.raises(NotInTransaction) as caught:
            publish(OrderMade(order_id=1), using="other")

        assert "Transactions are open in" not in str(caught.value)

    @pytest.mark.parametrize("block", [transaction.atomic, outbox_atomic])
    def test_holds_what_a_block_in_it_publishes(self, block):
        with block():
            publish(OrderMade(order_id=1))

        assert [body["order_id"] for body in bodies()] == [1]


@override_settings(OUTBOX=OUTBOX)
class TestATestCasesOwnTransaction(TestCase):
    """Those of Django's TestCase: around the class, and around each test."""

    @classmethod
    def setUpTestData(cls):
        with outbox_atomic():
            publish(OrderMade(order_id=1))
        try:
            publish(OrderMade(order_id=2))
        except NotInTransaction as error:
            cls.refused = str(error)

    def test_of_the_class_is_none_of_the_publisher(self):
        assert "The transaction around this test does not count" in self.refused
        assert [body["order_id"] for body in bodies()] == [1]

    def test_of_the_test_is_none_of_the_publisher(self):
        with pytest.raises(NotInTransaction):
            publish(OrderMade(order_id=3))

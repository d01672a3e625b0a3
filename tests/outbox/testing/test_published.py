from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import transaction

from outbox import atomic as outbox_atomic
from outbox import publish, publish_raw
from tests.outbox.publishing.rows import OrderMade, ParcelMoved

pytestmark = pytest.mark.usefixtures("own_topics")


def publish_orders(*customers):
    with transaction.atomic():
        for number, customer in enumerate(customers, 1):
            publish(OrderMade(order_id=number, customer=customer))


def told_by(assertion, *args, **fields):
    with pytest.raises(AssertionError) as caught:
        assertion(*args, **fields)
    return str(caught.value)


class TestPublished:
    def test_gives_messages_as_they_were_published(self, outbox):
        publish_orders("Ann", "Bob")

        assert [one.message for one in outbox.published()] == [
            OrderMade(order_id=1, customer="Ann"),
            OrderMade(order_id=2, customer="Bob"),
        ]

    def test_gives_what_stands_on_the_envelope(self, outbox):
        group = Group.objects.create(name="staff")
        with transaction.atomic():
            publish(OrderMade(order_id=1), about=group, headers={"tenant": "north"}, delay=timedelta(minutes=5))

        [one] = outbox.published()
        assert (one.topic, one.key, one.tag, one.about) == ("made", "1", "new", f"auth.group:{group.pk}")
        assert one.headers["tenant"] == "north"
        assert one.due_at is not None
        assert one.database == "default"

    def test_leaves_out_what_was_rolled_back(self, outbox):
        with outbox_atomic():
            publish(OrderMade(order_id=1))
            transaction.set_rollback(True)

        assert outbox.published() == []

    def test_takes_a_type_or_a_topic_and_values(self, outbox):
        publish_orders("Ann", "Bob")
        with transaction.atomic():
            publish_raw("made", {"lines": 3})
            publish_raw("made", b"lines;3")

        assert [one.message.order_id for one in outbox.published(OrderMade, customer="Bob")] == [2]
        assert len(outbox.published("made")) == 4
        assert outbox.published("made", lines=3)[0].message == {"lines": 3}
        assert outbox.published("moved") == []
        assert outbox.published()[-1].message == b"lines;3"

    def test_takes_values_by_any_name(self, outbox):
        with transaction.atomic():
            publish_raw("made", {"kind": "paper"})

        assert len(outbox.published("made", kind="paper")) == 1

    @pytest.mark.django_db(databases=["default", "other"])
    def test_looks_into_each_database_of_the_test(self, outbox):
        publish_orders("Ann")
        with outbox_atomic("other"):
            publish(OrderMade(order_id=2))

        assert [one.database for one in outbox.published(OrderMade)] == ["default", "other"]


class TestAssertPublished:
    def test_is_content_with_the_message_and_no_other(self, outbox):
        publish_orders("Ann", "Bob", "Ann")

        outbox.assert_published(OrderMade, order_id=2)
        outbox.assert_published(OrderMade, customer="Ann", times=2)
        outbox.assert_published(OrderMade, customer="Eve", times=0)

    def test_shows_what_is_nearest(self, outbox):
        publish_orders("Ann", "Bob")

        told = told_by(outbox.assert_published, OrderMade, order_id=2, customer="Eve")

        assert told.splitlines() == [
            "OrderMade(order_id=2, customer='Eve') was not published.",
            "Most similar:",
            "  OrderMade(order_id=2, customer='Bob'): customer is 'Bob', not 'Eve'",
            "  OrderMade(order_id=1, customer='Ann'): order_id is 1, not 2; customer is 'Ann', not 'Eve'",
        ]

    def test_counts_what_else_there_is(self, outbox):
        publish_orders(*["Ann", "Bob", "Cid", "Dan", "Eve"])
        with transaction.atomic():
            publish_raw("made", b"x")

        told = told_by(outbox.assert_published, OrderMade, order_id=7)

        assert told.splitlines()[-2:] == ["  and 2 more of them", "Also published: 1 x raw to 'made'"]

    def test_names_what_was_published_instead(self, outbox):
        publish_orders("Ann", "Bob")

        told = told_by(outbox.assert_published, ParcelMoved)

        assert told == "ParcelMoved was not published.\nPublished instead: 2 x OrderMade"

    def test_asks_about_a_rollback_where_there_is_nothing(self, outbox):
        told = told_by(outbox.assert_published, OrderMade, order_id=1)

        assert told.startswith("OrderMade(order_id=1) was not published.\nThis test sees no published message. Was the")

    def test_shows_those_that_are_too_many(self, outbox):
        publish_orders("Ann", "Ann")

        told = told_by(outbox.assert_published, OrderMade, customer="Ann")

        assert told.splitlines()[0] == "OrderMade(customer='Ann') was published twice, not once."
        assert len(told.splitlines()) == 3

    def test_says_that_there_is_no_such_topic(self, outbox):
        assert told_by(outbox.assert_published, "maed").endswith("is not in OUTBOX[\"TOPICS\"]. Did you mean 'made'?")

    def test_says_that_a_field_is_none_of_the_type(self, outbox):
        told = told_by(outbox.assert_published, OrderMade, oder_id=1)

        assert told == "OrderMade has no field 'oder_id'. Did you mean 'order_id'?"

    def test_says_that_something_is_no_type(self, outbox):
        assert "pass the class" in told_by(outbox.assert_published, OrderMade(order_id=1)).lower()


class TestAssertNothingPublished:
    def test_shows_what_was_published(self, outbox):
        outbox.assert_nothing_published()
        publish_orders("Ann")

        assert told_by(outbox.assert_nothing_published) == ("A message was published:\n  OrderMade(order_id=1, customer='Ann')")

    def test_may_be_about_some_of_it(self, outbox):
        publish_orders("Ann")

        outbox.assert_nothing_published(ParcelMoved)
        outbox.assert_nothing_published(OrderMade, customer="Bob")
        assert "of OrderMade(customer='Ann')" in told_by(outbox.assert_nothing_published, OrderMade, customer="Ann")

"""Messages that a group lost or ignored, on their real way: published, relayed, handled, and deleted where they got lost."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from outbox import Message, atomic, consumer, publish
from outbox.consuming import register
from outbox.consuming.gaps import find_gaps
from outbox.consuming.register import group
from outbox.deliver_again import GONE, IN_ANOTHER_OUTBOX, NO_GROUP, ON_ITS_WAY, deliver_again, ignored, lost
from outbox.models import Batch, Deferred, Gap, Inbox, MessageRow, OperatorAct, State
from tests.outbox.pipeline.stories import handle, relay

pytestmark = pytest.mark.django_db(transaction=True)


class Bought(Message):
    number: int = 0

    class Meta:
        topic = "orders"
        type = "test.bought"


@pytest.fixture(autouse=True)
def _register(monkeypatch):
    monkeypatch.setattr(register, "registered", {**register.registered})


@pytest.fixture
def books():
    """A group that takes all messages of the topic."""
    consumer(topic="orders", group="books")(lambda message: None)


def lose(message_id) -> None:
    """Have the group handle all messages but one, which the broker loses, long enough ago to be a gap."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM outbox_embedded_message WHERE message_id = %s", [str(message_id)])
    Inbox.objects.filter(message_id=message_id).delete()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE outbox_inbox SET handled_at = handled_at - interval '2 hours'")
    find_gaps(group("books"))


@pytest.fixture
def missing(books):
    """The second of three messages, which the group lost."""
    ids = relay(3)
    handle("books")
    lose(ids[1])
    return ids[1]


class TestLost:
    def test_names_the_message_of_each_number(self, missing):
        [row] = lost("default")

        assert (row.group, row.topic, row.number, row.message_id, row.refused) == ("books", "orders", 2, missing, "")

    def test_says_where_the_row_is_gone(self, missing):
        MessageRow.objects.filter(id=missing).delete()

        assert [(row.message_id, row.refused) for row in lost("default")] == [(missing, GONE)]

    def test_counts_numbers_whose_batch_is_gone(self, missing):
        Batch.objects.all().delete()

        assert [(row.message_id, row.messages, row.refused) for row in lost("default")] == [(None, 1, GONE)]

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_says_where_another_outbox_published_it(self, missing):
        Gap.objects.update(source="urn:uuid:theirs")

        assert [row.refused for row in lost("default")] == [IN_ANOTHER_OUTBOX]

    def test_says_where_the_relay_sends_it(self, missing):
        Batch.objects.update(state=State.RELEASED)

        assert [row.refused for row in lost("default")] == [ON_ITS_WAY]

    def test_says_where_the_group_has_no_code(self, missing):
        Gap.objects.update(consumer_group="former")

        assert [row.refused for row in lost("default")] == [NO_GROUP]


class TestDeliverAgain:
    def test_brings_a_lost_message_to_its_group_and_closes_the_gap(self, missing):
        assert deliver_again(lost("default"), by="ada", reason="the disk was full") == 1

        find_gaps(group("books"))
        assert Gap.objects.get().closed_at is not None
        assert handle("books") == 1
        assert Inbox.objects.get(message_id=missing).number == 2
        act = OperatorAct.objects.get()
        assert (act.act, act.message_id, act.consumer_group, act.acted_by) == ("delivered again", missing, "books", "ada")

    def test_delivers_nothing_twice(self, missing):
        rows = lost("default")
        deliver_again(rows, by="ada")
        handle("books")

        assert deliver_again(rows, by="bob") == 0
        assert (handle("books"), OperatorAct.objects.count()) == (0, 1)

    def test_leaves_out_what_cannot_be_delivered(self, missing):
        MessageRow.objects.filter(id=missing).delete()

        assert deliver_again(lost("default"), by="ada") == 0


class TestIgnored:
    @pytest.fixture
    def bought(self):
        """A message that its group ignored, since it had no handler for the type."""
        consumer(topic="orders", group="books", tags={"none"})(lambda message: None)
        with atomic():
            message_id = publish(Bought()).message_id
        relay(0)
        handle("books")
        assert Inbox.objects.get(consumer_group="books").delivery_count == 0
        return message_id

    def test_are_found_when_the_group_has_a_handler(self, bought):
        assert ignored(group("books")) == []

        consumer(Bought, group="books")(lambda message: None)

        assert [(row.message_id, row.type) for row in ignored(group("books"))] == [(bought, "test.bought")]
        assert ignored(group("books"), since=Inbox.objects.get(consumer_group="books").handled_at + timedelta(seconds=1)) == []

    def test_are_handled_then(self, bought):
        handled = []
        consumer(Bought, group="books")(handled.append)

        assert deliver_again(ignored(group("books")), by="ada") == 1
        assert Deferred.objects.count() == 1
        handle("books")

        assert (len(handled), ignored(group("books"))) == (1, [])
        assert Inbox.objects.get(consumer_group="books").delivery_count > 0

    def test_are_not_those_that_an_operator_discarded(self, bought):
        about = {"message_id": bought, "topic": "orders", "consumer_group": "books"}
        OperatorAct.objects.create(act="discarded", reason="", acted_by="ada", **about)
        consumer(Bought, group="books")(lambda message: None)

        assert ignored(group("books")) == []

"""What a finding names is looked at in real tables, of the outbox and of the embedded broker."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from outbox import consumer
from outbox.consuming import register
from outbox.models import Deferred, Duplicate, Inbox, MessageState, State
from outbox.pipeline import repair
from outbox.pipeline.models import AuditFinding, AuditRun
from tests.factories import BatchFactory, MessageRowFactory, TopicFactory, message_id
from tests.outbox.pipeline.stories import handle, relay

pytestmark = pytest.mark.django_db(transaction=True)

SOURCE = "SELECT id FROM outbox_source"


@pytest.fixture
def run():
    return AuditRun.objects.create(asked_by="command", host="here", pid=1, settle_seconds=0)


@pytest.fixture
def finding(run):
    def finding(**fields):
        AuditRun.objects.update(as_of=datetime.now(UTC))
        with connection.cursor() as cursor:
            cursor.execute(SOURCE)
            (source,) = cursor.fetchone()
        given = {"kind": "lost", "stage": "broker", "topic": "orders", "source": source, "count": 1, "text": "lost"}
        return AuditFinding.objects.create(
            **{"run": run, "message_ids": [], "about": [], "consumer_group": "", "subject": "", **given, **fields}
        )

    return finding


def numbered(first, last=None, **fields):
    return {"lane": 1, "first_number": first, "last_number": last or first, "count": (last or first) - first + 1, **fields}


@pytest.fixture
def sent():
    return BatchFactory(
        topic=TopicFactory(name="orders"), size=5, state=State.SENT, sent_at=datetime.now(UTC) - timedelta(hours=1)
    )


class TestPlan:
    def test_names_the_messages_by_their_numbers(self, finding, sent):
        assert repair.plan(finding(**numbered(2, 3)), "default").ids == sent.message_ids[1:3]

    def test_names_messages_without_numbers_by_id_and_counts_those_not_named(self, finding):
        row = MessageRowFactory(topic=TopicFactory(name="orders"))

        planned = repair.plan(finding(stage="outbox", message_ids=[str(row.id), str(message_id())], count=9), "default")

        assert planned.ids == [row.id]
        assert planned.refused == {repair.NOT_NAMED: 7, repair.GONE: 1}

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"kind": "orphan"}, repair.NOT_LOST),
            ({"resent_at": datetime.now(UTC)}, repair.DONE_BEFORE),
            ({"subject": "orders", "about": ["shop.order:1"]}, repair.NO_MESSAGE),
            ({"source": "urn:uuid:theirs"}, repair.OTHER_SOURCE),
            ({"topic": "gone"}, repair.NO_TOPIC),
            ({"stage": "inbox", "consumer_group": "gone"}, repair.NO_GROUP),
            (numbered(2, stage="outbox"), repair.NO_TRACE),
            (numbered(2, 4) | {"count": 2}, repair.SCATTERED),
        ],
    )
    def test_says_why_nothing_can_be_sent(self, finding, sent, fields, reason):
        one = finding(**fields)

        planned = repair.plan(one, "default")

        assert (planned.ids, planned.refused) == ([], {reason: one.count})

    def test_counts_what_was_pruned(self, finding, sent):
        assert repair.plan(finding(**numbered(5, 7)), "default").refused == {repair.GONE: 2}


@pytest.fixture
def books(monkeypatch):
    """Register a group that takes all messages of the topic, those without a type, too."""
    monkeypatch.setattr(register, "registered", {**register.registered})
    consumer(topic="orders", group="books")(lambda message, context: None)


class TestSend:
    def test_brings_what_the_broker_lost_to_its_groups(self, finding):
        ids = relay(3)
        handle("points")
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM outbox_embedded_message WHERE message_id = %s", [str(ids[1])])
            cursor.execute("DELETE FROM outbox_inbox WHERE message_id = %s", [ids[1]])

        done = repair.send(finding(**numbered(2)).pk, "default", by="ada")

        assert done.ids == [ids[1]]
        relay(0)
        assert handle("points") == 1
        assert MessageState.objects.get(id=ids[1]).number == 2
        assert AuditFinding.objects.get().resent_by == "ada"

    def test_delivers_what_one_group_lost_to_that_group_alone(self, finding, books):
        ids = relay(3)
        handle("books")
        handle("cart")
        Inbox.objects.filter(message_id=ids[1], consumer_group="books").delete()

        done = repair.send(finding(**numbered(1, 3, stage="inbox", consumer_group="books")).pk, "default", by="ada")

        assert (done.ids, done.refused) == ([ids[1]], {repair.HANDLED_SINCE: 2})
        assert MessageState.objects.get(id=ids[1]).state == "sent"
        assert list(Deferred.objects.values_list("consumer_group", "message_id", "reason")) == [("books", ids[1], "lost")]
        assert (handle("books"), handle("cart")) == (1, 0)
        assert Inbox.objects.get(consumer_group="books", message_id=ids[1]).number == 2

    def test_ignores_what_the_group_has_no_handler_for(self, finding):
        ids = relay(1)
        handle("points")
        Inbox.objects.filter(consumer_group="points").delete()

        done = repair.send(finding(**numbered(1, stage="inbox", consumer_group="points")).pk, "default", by="ada")

        assert (done.ids, Deferred.objects.count()) == (ids, 0)
        assert Inbox.objects.get(consumer_group="points").delivery_count == 0

    def test_does_nothing_twice(self, finding, sent):
        one = finding(**numbered(2))
        assert repair.send(one.pk, "default", by="ada").ids

        second = repair.send(one.pk, "default", by="bob")

        assert (second.ids, second.refused) == ([], {repair.DONE_BEFORE: 1})
        assert AuditFinding.objects.get().resent_by == "ada"

    def test_does_not_send_what_another_run_saw_lost_before_it_was_sent(self, finding, sent, run):
        older = finding(**numbered(2))
        repair.send(finding(**numbered(2)).pk, "default", by="ada")
        relay(0)

        second = repair.send(older.pk, "default", by="bob")

        assert (second.ids, list(second.refused)) == ([], ["It was sent again after that audit."])

    def test_brings_what_the_broker_still_has_for_the_group_once(self, finding, books):
        relay(1)
        handle("books")
        ids = relay(2)

        done = repair.send(finding(**numbered(2, 3, stage="inbox", consumer_group="books")).pk, "default", by="ada")

        assert done.ids == ids
        assert handle("books") == 2
        assert Duplicate.objects.filter(consumer_group="books").count() == 2

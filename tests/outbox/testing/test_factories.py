import json
from uuid import UUID

import pytest

from outbox.models import DeadMessage, Inbox, MessageState, State
from outbox.testing import factories
from tests.outbox.publishing.rows import OrderMade

pytestmark = pytest.mark.django_db

FACTORIES = [
    factories.BatchFactory,
    factories.CheckBackFactory,
    factories.DeadMessageFactory,
    factories.DelayedFactory,
    factories.FailedDeliveryFactory,
    factories.InboxFactory,
    factories.MessageRowFactory,
    factories.TicketFactory,
    factories.TopicFactory,
]


class TestEachFactory:
    @pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
    def test_makes_as_many_rows_as_it_is_asked_for(self, factory):
        model = factory._meta.model
        before = model.objects.count()

        factory.create_batch(2)

        assert model.objects.count() == before + 2


class TestBatchFactory:
    @pytest.mark.parametrize(
        ("trait", "standing"),
        [
            ({}, "claimed"),
            ({"released": True}, "released"),
            ({"prepared": True}, "prepared"),
            ({"sent": True}, "sent"),
            ({"dead": True}, "dead"),
            ({"discarded": True}, "discarded"),
        ],
    )
    def test_makes_batches_in_each_state(self, trait, standing):
        batch = factories.BatchFactory(size=2, **trait)

        assert {MessageState.objects.get(id=message).state for message in batch.message_ids} == {standing}

    def test_gives_each_prepared_message_its_half(self):
        batch = factories.BatchFactory(size=3, prepared=True)

        assert (batch.state, len(set(batch.half_ids))) == (State.PREPARED, 3)


class TestMessageRowFactory:
    def test_writes_a_message_as_publish_does(self, settings):
        settings.OUTBOX = {"TOPICS": {"made": {}}}

        row = factories.MessageRowFactory(of=OrderMade(order_id=7))

        assert OrderMade.from_body(row.body) == OrderMade(order_id=7)
        assert (row.key, json.loads(row.headers)["ce-type"]) == ("7", "OrderMade")

    def test_takes_an_id_that_holds_no_time(self):
        known = UUID("ffffffff-ffff-4fff-bfff-ffffffffffff")

        assert factories.MessageRowFactory(id=known).id == known

    def test_puts_a_message_into_its_topic(self, settings):
        settings.OUTBOX = {"TOPICS": {"made": {}}}

        ticket = factories.TicketFactory(of=OrderMade(order_id=7))

        state = MessageState.objects.get(id=ticket.message_id)
        assert (state.topic, state.state) == ("made", "waiting")


class TestTopicFactory:
    def test_takes_the_topic_that_is_there(self):
        known = factories.TopicFactory(name="orders")

        assert factories.TopicFactory(name="orders").id == known.id


class TestDeadMessageFactory:
    def test_keeps_a_copy_of_a_message_of_a_dead_batch(self):
        dead = factories.DeadMessageFactory()

        assert MessageState.objects.get(id=dead.message_id).state == "dead"
        assert DeadMessage.objects.get().topic == MessageState.objects.get(id=dead.message_id).topic


class TestInboxFactory:
    def test_says_that_a_group_has_handled_a_message(self):
        row = factories.InboxFactory(consumer_group="cart")

        assert Inbox.objects.get().idempotency_key == str(row.message_id)

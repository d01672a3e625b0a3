"""Why a message is not sent or not handled yet, in each state."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from outbox import consumer, database
from outbox.consuming import register
from outbox.models import Inbox, OperatorAct, Process, State, Topic
from outbox.monitoring.why import why
from outbox.testing.factories import DeferredFactory
from tests.factories import BatchFactory, DelayedFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id
from tests.outbox.consuming.messages import Placed
from tests.outbox.monitoring.times import ago

pytestmark = pytest.mark.django_db


@pytest.fixture
def orders(settings, no_consumers):
    return TopicFactory(name="orders")


@pytest.fixture
def relay():
    return Process.objects.create(kind="relay", host="web", pid=7, broker="default", lane=3)


@pytest.fixture
def ask():
    return lambda message_id, using="default": why(database.raw("default"), message_id, using=using)


def a_consumer(group="cart", **fields):
    return Process.objects.create(kind="consumer", host="h", pid=1, broker="default", consumer_group=group, **fields)


def ahead(**time):
    return datetime.now(UTC) + timedelta(**time)


class TestUnsent:
    def test_where_no_relay_runs(self, orders, ask):
        ticket = TicketFactory(topic=orders)

        assert ask(ticket.message_id) == (
            "Broker 'default': (outbox.no_relay) No relay is running. Start outbox_relay, or check that "
            "Celery's worker and beat run. Messages wait meanwhile."
        )

    def test_where_the_relay_is_frozen(self, orders, ask, relay):
        Process.objects.update(beat_at=ago(seconds=40))
        ticket = TicketFactory(topic=orders)

        answer = ask(ticket.message_id)

        assert answer.startswith("Broker 'default', since ")
        assert "(outbox.no_relay) No relay is running: the last heartbeat came 40 s ago, from web:7. Start outbox_relay" in answer

    def test_where_the_topic_is_paused(self, orders, ask):
        Topic.objects.filter(name="orders").update(paused=True, paused_by="anna", pause_reason="stocktaking")
        ticket = TicketFactory(topic=orders)

        assert ask(ticket.message_id) == (
            "Topic 'orders': (outbox.paused) It is paused by anna: stocktaking. End the pause with outbox_pause orders "
            "--database default --resume."
        )

    def test_where_the_settings_have_no_such_topic(self, ask, relay):
        ticket = TicketFactory(topic=TopicFactory(name="former"))

        assert ask(ticket.message_id) == (
            "Topic 'former': (outbox.unknown_topic) 1 message waits, but OUTBOX[\"TOPICS\"] has no such topic, so no relay sends "
            "them. Restore the topic in settings until they are sent."
        )

    def test_where_the_broker_is_away(self, orders, ask, relay):
        Process.objects.update(breaker="open")
        ticket = TicketFactory(topic=orders)

        assert ask(ticket.message_id).startswith(
            "Broker 'default': (outbox.broker_away) The relay web:7 gets no answer: its circuit breaker is open. Start it, "
        )

    def test_where_the_relay_fails(self, orders, ask, relay):
        Process.objects.update(errors={"relay": "permission denied for table outbox_ticket"})
        ticket = TicketFactory(topic=orders)

        assert ask(ticket.message_id).startswith(
            "Broker 'default': (outbox.process_fails) The relay of process web:7 fails. permission denied for table "
            "outbox_ticket. Correct"
        )

    def test_where_only_the_maintenance_of_the_relay_fails(self, orders, ask, relay):
        Process.objects.update(errors={"maintenance": "must be owner of table outbox_message"})
        ticket = TicketFactory(topic=orders)

        assert ask(ticket.message_id) == "It is the next message that the relay sends."

    def test_where_others_are_ahead(self, orders, ask, relay):
        TicketFactory.create_batch(2, topic=orders)
        ticket = TicketFactory(topic=orders)

        assert ask(ticket.message_id) == "It waits for the relay, behind 2 messages of its topic."

    def test_where_nothing_is_in_its_way(self, orders, ask, relay):
        assert ask(TicketFactory(topic=orders).message_id) == "It is the next message that the relay sends."

    def test_where_it_is_due_later(self, orders, ask, relay):
        delayed = DelayedFactory(topic=orders, due_at=ahead(seconds=41))

        assert ask(delayed.message_id) in ("It is due in 41 s.", "It is due in 40 s.")

    def test_where_a_relay_is_sending_it(self, orders, ask, relay):
        batch = BatchFactory(topic=orders, state=State.CLAIMED, owner=3, lease_until=ahead(seconds=31))

        answer = ask(batch.message_ids[0])

        assert answer.startswith("Relay web:7 is sending it, with a lease for another 3")

    def test_where_sending_failed(self, orders, ask, relay):
        batch = BatchFactory(topic=orders, state=State.RELEASED, failures=2, last_error="Time-out.", due_at=ahead(seconds=41))

        answer = ask(batch.message_ids[0])

        assert answer.startswith("Sending failed 2 times, last: Time-out. The next try is in 4")

    def test_where_its_commit_is_not_confirmed(self, orders, ask, relay):
        batch = BatchFactory(topic=orders, state=State.PREPARED, decided_at=ago(seconds=15))

        answer = ask(batch.message_ids[0])

        assert answer.startswith("Its half message is stored, and its commit, decided 15 s ago, is not confirmed.")

    def test_where_the_broker_rejected_it(self, orders, ask, relay):
        batch = BatchFactory(topic=orders, state=State.DEAD, last_error="Too large.")

        one = batch.message_ids[0]
        assert ask(one) == f"It is dead: Too large. Replay it with outbox_replay --unsent {one}, or add --discard."
        assert f"outbox_replay --unsent {one} --database other, or" in ask(one, using="other")

    def test_where_an_operator_has_discarded_it(self, orders, ask):
        batch = BatchFactory(topic=orders, state=State.DISCARDED)

        assert ask(batch.message_ids[0]).startswith("An operator has discarded it")

    def test_where_nothing_has_it(self, orders, ask):
        assert ask(MessageRowFactory(topic=orders).id).startswith("It has no ticket, delayed row or batch")

    def test_where_there_is_no_such_message(self, ask):
        assert ask(uuid4()) is None


class TestBehindItsKey:
    @pytest.fixture
    def bills(self, settings, relay):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"bills": {"TYPE": "fifo"}}}
        return TopicFactory(name="bills", type="fifo", ordered=True)

    def test_which_the_broker_rejected(self, bills, ask):
        head = BatchFactory(topic=bills, size=1, state=State.DEAD, order_keys=[5])
        ticket = TicketFactory(topic=bills, order_key=5, message=MessageRowFactory(topic=bills, key="A1"))

        assert ask(ticket.message_id) == (
            f"It waits behind message {head.message_ids[0]} of the same key 'A1', which is dead: "
            "replay or discard it with outbox_replay --unsent."
        )

    def test_which_waits_too(self, bills, ask):
        first, second = (TicketFactory(topic=bills, order_key=5) for _ in range(2))

        assert ask(second.message_id).startswith(f"It waits behind message {first.message_id} of the same key")
        assert ask(first.message_id) == "It is the next message that the relay sends."

    def test_but_not_of_its_key_that_is_later(self, bills, ask):
        lost = BatchFactory(topic=bills, state=State.RELEASED, order_keys=[5], lane=1, first_seq=31)
        BatchFactory(topic=bills, state=State.DEAD, order_keys=[5], lane=2, first_seq=1)

        assert "behind" not in ask(lost.message_ids[0])

    def test_but_not_of_another_key(self, bills, ask):
        TicketFactory(topic=bills, order_key=5)
        BatchFactory(topic=bills, size=1, state=State.DEAD, order_keys=[5])
        ticket = TicketFactory(topic=bills, order_key=6)

        assert ask(ticket.message_id) == "It waits for the relay, behind 1 message of its topic."


class TestSent:
    @pytest.fixture
    def message(self, orders):
        consumer(Placed, group="cart")(lambda message, context: None)
        headers = '{"ce-type": "tests.Placed", "ce-tag": "placed"}'
        row = MessageRowFactory(topic=orders, headers=headers)
        BatchFactory(topic=orders, message_ids=[row.id], state=State.SENT)
        return row.id

    def test_and_handled_by_all(self, message, ask):
        Inbox.objects.create(consumer_group="cart", idempotency_key="k", message_id=message, topic="orders")

        assert ask(message) == "It was sent, and every known group has handled it."

    @pytest.mark.parametrize(("code", "again"), [(True, " Deliver it again with outbox_replay --ignored."), (False, "")])
    def test_to_a_group_that_ignored_it(self, message, ask, monkeypatch, code, again):
        Inbox.objects.create(consumer_group="cart", idempotency_key="k", message_id=message, topic="orders", delivery_count=0)
        if not code:
            monkeypatch.setattr(register, "registered", {})

        says = "It was sent. Group 'cart' ignored it: no live process of the group had a handler for it."
        assert ask(message) == says + again

    def test_to_a_group_whose_code_was_removed(self, message, ask):
        Inbox.objects.create(consumer_group="cart", idempotency_key="k", message_id=message, topic="orders")
        about = {"consumer_group": "mail", "idempotency_key": "j", "topic": "orders", "lane": 1, "number": 1}
        Inbox.objects.create(message_id=message_id(), **about)

        assert ask(message) == (
            "It was sent. Group 'mail', which reads the topic and has no handler for it in this release, has not handled it."
        )

    def test_to_a_group_of_another_service_that_wants_other_types(self, message, ask):
        Inbox.objects.create(consumer_group="cart", idempotency_key="k", message_id=message, topic="orders")
        about = {"consumer_group": "mail", "idempotency_key": "j", "topic": "orders", "lane": 1, "number": 1}
        Inbox.objects.create(message_id=message_id(), **about)
        a_consumer("mail", subscriptions=["orders\x1fshop.Billed\x1f*"])

        assert ask(message) == "It was sent, and every known group has handled it."

    def test_though_no_group_is_known(self, message, ask, monkeypatch):
        monkeypatch.setattr(register, "registered", {})

        assert ask(message) == "It was sent. No consumer group is known that reads it."

    def test_to_a_group_without_a_consumer(self, message, ask):
        assert ask(message) == (
            "It was sent. Group 'cart': (outbox.no_consumer) No consumer is running (none sends heartbeats), and it waits. "
            "Start outbox_consume --group cart."
        )

    def test_to_a_group_that_has_not_come_to_it(self, message, ask):
        a_consumer()

        assert ask(message) == "It was sent. Group 'cart' has not handled it yet."

    def test_to_a_group_whose_handler_is_running(self, message, ask):
        about = {"topic": "orders", "message_id": str(message), "handler": "shop.ship", "limit_seconds": None}
        a_consumer(handling={**about, "seconds": 70.0})

        assert ask(message).startswith(
            "It was sent. Group 'cart' has been handling it for 70 s, with shop.ship. Group 'cart', since "
        )
        assert f"(outbox.group_stuck) shop.ship has been handling message {message} of topic 'orders' for 70 s." in ask(message)

    def test_to_a_group_whose_consumer_fails(self, message, ask):
        a_consumer(errors={"consumer": "permission denied for table outbox_inbox"})

        assert ask(message).startswith(
            "It was sent. Group 'cart': (outbox.process_fails) The consumer of process h:1 fails. permission denied "
            "for table outbox_inbox. Correct"
        )

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            (
                {"failures": 3, "error": "ValueError('boom')", "waiting": True},
                "deferred: its handler failed 3 times, next run in 60 min. Last: ValueError('boom').",
            ),
            ({"reason": "stop"}, "deferred: its consumer was stopped, next run now."),
            (
                {"reason": "again", "crashes": 2},
                "deferred: it was delivered before, and may have killed its process, 2 runs never ended, next run now.",
            ),
            ({"dead": True}, "dead letter: ValueError: no such customer. Replay or discard it with outbox_replay."),
            ({"held": True}, "an operator holds it. outbox_replay --retry-now ends that."),
        ],
    )
    def test_to_a_group_that_has_deferred_it(self, message, ask, fields, says):
        a_consumer()
        DeferredFactory(consumer_group="cart", message_id=message, **fields)

        assert ask(message) == f"It was sent. Group 'cart': {says}"

    def test_to_a_group_that_has_deferred_it_and_has_no_consumer(self, message, ask):
        DeferredFactory(consumer_group="cart", message_id=message, reason="slow")

        assert ask(message) == (
            "It was sent. Group 'cart': deferred: it waited behind a slow handler, next run now. "
            "Group 'cart': (outbox.no_consumer) No consumer is running (none sends heartbeats), and it waits. "
            "Start outbox_consume --group cart."
        )

    def test_to_a_group_where_it_waits_behind_another_one(self, message, ask):
        a_consumer()
        DeferredFactory(consumer_group="cart", order_key="cart orders 7", dead=True)
        head = DeferredFactory(consumer_group="cart", order_key="cart orders 7")
        DeferredFactory(consumer_group="cart", order_key="cart orders 7", message_id=message, asleep=True)

        assert ask(message) == f"It was sent. Group 'cart': it waits behind message {head.own_id} of the same key."

    def test_to_a_group_whose_processes_have_no_handler_for_it(self, message, ask):
        DeferredFactory(consumer_group="mail", message_id=message, no_code_since=ago(minutes=30))
        Inbox.objects.create(consumer_group="cart", idempotency_key="k", message_id=message, topic="orders")

        assert ask(message) == (
            "It was sent. Group 'mail': no live process of the group has had a handler for it for 30 min. "
            "Group 'mail': (outbox.no_consumer) No consumer is running (none sends heartbeats), and it waits. "
            "Start the consumers of the release that has the group. If it was removed for good, outbox_forget drops them."
        )

    def test_to_a_group_for_which_somebody_discarded_it(self, message, ask):
        about = {"consumer_group": "cart", "topic": "orders", "message_id": message}
        OperatorAct.objects.create(**about, act="discarded", reason="a test order", acted_by="ada")
        Inbox.objects.create(**about, idempotency_key="k", delivery_count=0)

        assert ask(message) == "It was sent. It was discarded for group 'cart' by ada."

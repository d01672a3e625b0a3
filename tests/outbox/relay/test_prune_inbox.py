"""Pruning the inbox: a row is kept while its message may be delivered again."""

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from outbox import conf, consumer
from outbox.brokers.base import Outgoing
from outbox.brokers.capabilities import Receives
from outbox.brokers.memory import MemoryBroker
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.errors import BrokerUnavailable
from outbox.message import Header
from outbox.models import Batch, Inbox, State
from outbox.relay.maintenance import prune
from outbox.testing.factories import DeferredFactory
from project.shop.models import CartEntry
from tests.factories import BatchFactory, TopicFactory, message_id
from tests.outbox.conftest import Clock
from tests.outbox.consuming.deliveries import outgoing
from tests.outbox.consuming.messages import Placed

pytestmark = pytest.mark.django_db(transaction=True)

LONG_AGO = datetime(2001, 2, 3, 12, tzinfo=UTC)
NOW = datetime(2001, 2, 20, 12, tzinfo=UTC)  # with the retention of 7 days, the 13th is the first day that is kept


class TellingBroker(MemoryBroker):
    """A broker that returns the messages that a group has read but not finished."""

    asked: list[tuple[str, str, int]] = []  # alias, group, how many messages
    is_away = False
    dies_before_ack = False

    def may_deliver_again(self, group: str, message_ids: Collection[str]) -> set[str]:
        self.asked.append((self.alias, group, len(message_ids)))
        if self.is_away:
            raise BrokerUnavailable("It is restarted.")
        return super().may_deliver_again(group, message_ids)

    def ack(self, deliveries: Any) -> list[bool]:
        if deliveries and self.dies_before_ack:
            raise BrokerUnavailable("As if the process were killed here.")
        return super().ack(deliveries)


class SilentBroker(MemoryBroker):
    may_deliver_again = Receives.may_deliver_again

    def __init__(self, *args: Any) -> None:
        raise AssertionError("A broker that cannot tell is not made to be asked.")


@pytest.fixture
def brokers_clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def broker(settings, brokers_clock, monkeypatch) -> TellingBroker:
    def named(kind):
        return {"BACKEND": f"{__name__}.{kind.__name__}", "OPTIONS": {"NAME": uuid4().hex, "CLOCK": brokers_clock}}

    topics = {"orders": {}, "notes": {"BROKER": "second"}, "letters": {"BROKER": "silent"}}
    brokers = {"default": named(TellingBroker), "second": named(TellingBroker), "silent": named(SilentBroker)}
    settings.OUTBOX = {"BROKERS": brokers, "TOPICS": {name: {"TYPE": "normal", **of} for name, of in topics.items()}}
    monkeypatch.setattr(TellingBroker, "asked", [])
    broker = conf.make_broker("default")
    assert isinstance(broker, TellingBroker)
    return broker


def handled(topic: str = "orders", group: str = "cart", at: datetime = LONG_AGO, **fields: Any) -> Inbox:
    row = {"consumer_group": group, "idempotency_key": uuid4().hex, "message_id": message_id(), "topic": topic, **fields}
    return Inbox.objects.create(**row, handled_at=at)


def deliver(broker: MemoryBroker, row: Inbox) -> None:
    """Receive a group's message, and do not settle it."""
    broker.send([Outgoing(str(row.message_id), row.topic, b"{}")])
    read = broker.receive(row.consumer_group, {row.topic}, limit=100, invisible_for=timedelta(minutes=1), wait=timedelta(0))
    assert str(row.message_id) in {delivery.message_id for delivery in read}


def left() -> set[str]:
    return set(Inbox.objects.values_list("idempotency_key", flat=True))


class TestAMessageThatWasHandledAndNotAcknowledged:
    def test_is_applied_once_however_late_it_comes_again(
        self, broker: TellingBroker, brokers_clock: Clock, own_definitions: None, monkeypatch: pytest.MonkeyPatch
    ):
        @consumer(Placed, group="cart")
        def clear_cart(message: Placed, context: object) -> None:
            CartEntry.objects.create(invoice=message.invoice, change=-1)

        def step() -> None:
            worker = Worker(group("cart"), "default")
            try:
                worker.step(timedelta(0))
            finally:
                worker.close()

        broker.send([outgoing(Placed("A1"), headers={Header.SOURCE: "urn:uuid:4f89"})])
        monkeypatch.setattr(TellingBroker, "dies_before_ack", True)
        with pytest.raises(BrokerUnavailable):
            step()
        monkeypatch.setattr(TellingBroker, "dies_before_ack", False)
        brokers_clock.forward(timedelta(days=8))
        Inbox.objects.update(handled_at=datetime.now(UTC) - timedelta(days=8))
        prune("default")
        step()
        before_the_next = Inbox.objects.count()
        prune("default")

        assert CartEntry.objects.filter(invoice="A1").count() == 1
        assert (before_the_next, Inbox.objects.count(), sum(broker.backlog("cart").waiting.values())) == (1, 0, 0)


class TestTheInbox:
    def test_loses_what_is_past_its_time_and_done(self, broker):
        handled()
        young = handled(at=NOW)

        pruned = prune("default", now=NOW)

        assert pruned.rows["outbox_inbox"] == 1
        assert left() == {young.idempotency_key}

    def test_keeps_what_may_come_again_to_that_group(self, broker):
        row = handled(group="cart")
        handled(group="mail", message_id=row.message_id)
        deliver(broker, row)

        prune("default", now=NOW)

        assert left() == {row.idempotency_key}

    def test_keeps_what_was_handled_under_a_key_of_its_own(self, broker):
        row = handled(idempotency_key="order 4711")
        deliver(broker, row)

        prune("default", now=NOW)

        assert left() == {"order 4711"}

    def test_keeps_what_belongs_to_a_broker_that_is_away(self, broker, monkeypatch, caplog):
        row, other = handled(), handled("notes")
        monkeypatch.setattr(TellingBroker, "is_away", property(lambda self: self.alias == "default"))

        prune("default", now=NOW)

        assert left() == {row.idempotency_key}
        assert "on broker 'default' are not pruned now: It is restarted." in caplog.text
        assert other.idempotency_key not in left()

    @pytest.mark.parametrize("topic", ["letters", "forgotten"], ids=["its broker cannot tell", "nobody knows it"])
    def test_loses_rows_of_topics_without_making_a_broker_that_cannot_tell(self, topic):
        handled(topic)

        assert prune("default", now=NOW).rows["outbox_inbox"] == 1

    @pytest.mark.parametrize(("alias", "asked"), [("second", [("second", "nobody's any more", 1)]), ("scrapped", [])])
    def test_asks_the_broker_that_the_database_names_for_a_topic_that_the_settings_do_not(self, alias, asked):
        TopicFactory(name="old orders", broker=alias)
        handled("old orders", group="nobody's any more")

        pruned = prune("default", now=NOW)

        assert (TellingBroker.asked, pruned.rows["outbox_inbox"]) == (asked, 1)

    def test_is_walked_through_once_beside_what_stays(self, broker, monkeypatch, asked):
        monkeypatch.setattr("outbox.relay.maintenance.INBOX_SLICE", 10)
        rows = [handled(at=LONG_AGO + timedelta(seconds=number // 4)) for number in range(25)]
        for row in rows[5:20]:
            deliver(broker, row)
        asked.clear()

        assert prune("default", now=NOW).rows["outbox_inbox"] == 10

        statements = [query for query, _ in asked if "outbox_inbox" in str(query)]
        assert len(statements) == 5  # reads and deletes; of the second slice all rows stay
        assert left() == {row.idempotency_key for row in rows[5:20]}
        assert [count for _, _, count in TellingBroker.asked] == [10, 10, 5]


class TestAMessageThatIsDeferred:
    def test_is_remembered_so_that_a_replay_does_not_handle_it_again(self):
        kept = handled()
        handled(group="mail", message_id=kept.message_id)
        DeferredFactory(consumer_group="cart", message_id=kept.message_id, dead=True)

        prune("default", now=NOW)

        assert left() == {kept.idempotency_key}


class TestAMessageThatMayBeSentAgain:
    @pytest.mark.parametrize("state", [State.RELEASED, State.CLAIMED, State.PREPARED, State.DEAD])
    def test_is_remembered_until_its_batch_is_sent(self, state):
        """A relay that died after the send and before the mark: the next one sends again, however late."""
        kept, other = handled(), handled()
        batch = BatchFactory(size=2, state=state)
        Batch.objects.filter(id=batch.id).update(message_ids=[kept.message_id, message_id()])

        prune("default", now=NOW)
        before = left()
        Batch.objects.update(state=State.SENT, sent_at=LONG_AGO)
        prune("default", now=NOW)

        assert other.idempotency_key not in before
        assert before == {kept.idempotency_key}
        assert left() == set()

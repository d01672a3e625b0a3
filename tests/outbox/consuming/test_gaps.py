from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from outbox import consumer, database, signals
from outbox.brokers.base import Backlog, Broker, Outgoing
from outbox.brokers.capabilities import Receives
from outbox.brokers.memory import MemoryBroker
from outbox.consuming.gaps import find_gaps, watched_topics
from outbox.consuming.handle import handle
from outbox.consuming.register import group
from outbox.database.locks import Lock
from outbox.errors import BrokerUnavailable
from outbox.models import DeadMessage, Gap, Inbox, State, Topic
from outbox.testing.factories import DeferredFactory
from tests.factories import BatchFactory, message_id
from tests.outbox.consuming.deliveries import SOURCE, delivery, numbered
from tests.outbox.consuming.messages import Cancelled, Ignored, Placed

pytestmark = pytest.mark.django_db

LONG_AGO = timedelta(minutes=5)
NO_TIME = timedelta(0)


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(autouse=True)
def _group() -> None:
    consumer(Placed, group="cart")(lambda message, context: None)


def arrived(*numbers: int, ago: timedelta = LONG_AGO, born_ago: timedelta = timedelta(0), **fields) -> None:
    """Numbers that reached the group, as inbox rows."""
    fields = {"consumer_group": "cart", "source": SOURCE, "topic": "orders", "lane": 1} | fields
    for number in numbers:
        row = message_id(now() - born_ago)
        Inbox.objects.create(idempotency_key=str(row), message_id=row, number=number, handled_at=now() - ago, **fields)


def own_source() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT id FROM outbox_source")
        return cursor.fetchone()[0]


def gaps() -> list[tuple[int, int]]:
    return list(Gap.objects.filter(closed_at=None).order_by("first_number").values_list("first_number", "last_number"))


def find() -> list[tuple[int, int]]:
    """Look for gaps of the group; return those that are open then."""
    find_gaps(group("cart"))
    return gaps()


class TestFindGaps:
    def test_records_what_is_missing_between_numbers_that_came(self):
        arrived(1, 2, 5, 6, 8)

        assert find() == [(3, 4), (7, 7)]
        found = Gap.objects.first()
        assert (found.consumer_group, found.source, found.topic, found.lane) == ("cart", SOURCE, "orders", 1)

    def test_announces_each_once(self):
        heard = []
        signals.gap_found.connect(lambda **said: heard.append((said["lane"], said["first"], said["last"])), weak=False)
        arrived(1, 3)

        first, second = find_gaps(group("cart")), find_gaps(group("cart"))

        assert heard == [(1, 2, 2)]
        assert (len(first), len(second)) == (1, 0)

    def test_waits_for_the_settle_time(self):
        arrived(1, 3, ago=timedelta(seconds=30))

        assert find() == []

    def test_keeps_lanes_sources_and_groups_apart(self):
        arrived(1, 2)
        arrived(5, 6, lane=2)
        arrived(9, source="other")
        arrived(13, consumer_group="points")

        assert find() == []

    def test_closes_a_gap_when_its_numbers_came_after_all(self):
        arrived(1, 4)
        find_gaps(group("cart"))

        arrived(2, 3, ago=timedelta(0))
        assert find() == []
        assert Gap.objects.get().closed_at is not None

    def test_splits_a_gap_of_which_a_part_came(self):
        arrived(1, 10)
        find_gaps(group("cart"))

        arrived(2, 6, ago=timedelta(0))
        assert find() == [(3, 5), (7, 9)]

    def test_lets_a_gap_grow_by_numbers_that_were_explained_before(self):
        topic = Topic.objects.get(name="orders")
        source = own_source()
        batch = BatchFactory(topic=topic, first_seq=2, size=2, state=State.RELEASED)
        arrived(1, 6, source=source)
        assert find() == [(4, 5)]

        type(batch).objects.filter(pk=batch.pk).update(state=State.SENT)
        assert find() == [(2, 5)]

    @pytest.mark.parametrize("is_dead", [True, False])
    def test_takes_the_number_of_a_deferred_message_for_arrived(self, is_dead):
        DeferredFactory(consumer_group="cart", source=SOURCE, lane=1, number=2, dead=is_dead)
        arrived(1, 3)

        assert find() == []

    @pytest.mark.parametrize("state", State)
    def test_takes_numbers_for_explained_that_the_outbox_has_not_sent(self, state):
        BatchFactory(topic=Topic.objects.get(name="orders"), first_seq=2, size=3, state=state)
        arrived(1, 5, source=own_source())

        assert find() == ([(2, 4)] if state == State.SENT else [])

    def test_waits_for_what_the_broker_still_has_for_the_group(self, broker):
        batch = BatchFactory(topic=Topic.objects.get(name="orders"), lane=1, first_seq=1, size=3, state=State.SENT)
        arrived(1, 3, source=own_source())
        broker.receive("cart", ["orders"], limit=1, invisible_for=NO_TIME, wait=NO_TIME)
        broker.send([Outgoing(str(batch.message_ids[1]), "orders", b"{}")])

        assert find_gaps(group("cart")) == []
        assert gaps() == []

        broker.ack(broker.receive("cart", ["orders"], limit=1, invisible_for=LONG_AGO, wait=NO_TIME))
        assert find() == [(2, 2)]

    @pytest.mark.parametrize(
        ("backlog", "ago", "found"), [(2, LONG_AGO, []), (1, LONG_AGO, [(2, 3)]), (2, timedelta(hours=2), [(2, 3)])]
    )
    def test_waits_an_hour_while_a_broker_that_cannot_tell_has_as_much_before_it(self, broker, backlog, ago, found, monkeypatch):
        monkeypatch.setattr(MemoryBroker, "may_deliver_again", Receives.may_deliver_again)
        monkeypatch.setattr(MemoryBroker, "limits", Broker.limits)
        monkeypatch.setattr(MemoryBroker, "backlog", lambda broker, group: Backlog({"orders": backlog}))
        arrived(1, 4, ago=ago)

        assert find() == found

    @pytest.mark.parametrize(("ago", "found"), [(LONG_AGO, []), (timedelta(hours=2), [(2, 3)])])
    def test_waits_an_hour_for_a_broker_that_cannot_be_asked(self, ago, found, monkeypatch):
        def refuse(*_: object) -> None:
            raise BrokerUnavailable("gone")

        monkeypatch.setattr(MemoryBroker, "may_deliver_again", Receives.may_deliver_again)
        monkeypatch.setattr(MemoryBroker, "limits", Broker.limits)
        monkeypatch.setattr(MemoryBroker, "backlog", refuse)
        arrived(1, 4, ago=ago)

        assert find() == found

    def test_goes_on_with_a_gap_of_a_topic_that_the_settings_had(self):
        about = {"consumer_group": "cart", "source": SOURCE, "topic": "former", "lane": 1}
        Gap.objects.create(**about, first_number=2, last_number=5)
        arrived(3, topic="former")

        assert find() == [(2, 2), (4, 5)]

    def test_looks_for_a_split_position_in_its_own_batch(self):
        topic = Topic.objects.get(name="orders")
        BatchFactory(topic=topic, first_seq=2, size=3, state=State.DEAD, split=[2])
        arrived(1, 5, source=own_source())

        lost = find()
        BatchFactory(topic=topic, first_seq=3, size=1, state=State.RELEASED)
        find_gaps(group("cart"))

        assert lost == [(3, 3)]
        assert gaps() == []

    def test_knows_dead_messages_whose_batch_was_pruned(self):
        DeadMessage.objects.create(message_id=message_id(), batch_id=1, topic="orders", lane=1, number=2, reason="")
        arrived(1, 3, source=own_source())

        assert find() == []

    def test_asks_the_own_outbox_about_own_numbers_only(self):
        BatchFactory(topic=Topic.objects.get(name="orders"), first_seq=2, size=1, state=State.DEAD)
        arrived(1, 3)

        assert find() == [(2, 2)]

    def test_says_nothing_about_numbers_that_may_have_been_pruned(self):
        arrived(1, born_ago=timedelta(days=8))
        arrived(900)

        assert find() == []

    def test_counts_what_no_handler_takes_and_what_was_handled_under_an_own_key(self):
        consumer(Cancelled, group="cart", idempotency_key=lambda message: message.invoice)(lambda message, context: None)
        for number, message in enumerate([Placed("1"), Ignored(), Cancelled("1"), Cancelled("1"), Placed("2")], 1):
            handle(group("cart"), delivery(message, headers=numbered(number)))
        Inbox.objects.update(handled_at=now() - LONG_AGO)

        assert find() == []

    def test_leaves_it_to_the_one_that_is_looking(self, transactional_db):
        arrived(1, 3)
        with database.connect("default") as other:
            other.execute(f"SELECT pg_advisory_lock({Lock.GAPS}, hashtext('cart'))")

            meanwhile = find_gaps(group("cart"))
            other.execute("SELECT pg_advisory_unlock_all()")

        assert meanwhile == []
        assert find_gaps(group("cart")) != []


class TestWatchedTopics:
    def test_has_those_of_which_the_group_wants_some_tags_only(self):
        consumer(topic="plain", group="cart", tags={"placed"})(lambda message, context: None)

        assert watched_topics(group("cart")) == ["orders", "plain"]

    def test_leaves_out_delay_topics(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"orders": {"TYPE": "delay"}}}

        assert watched_topics(group("cart")) == []

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from django.db.transaction import set_rollback
from django.utils import timezone

from outbox import atomic, database, models, publish
from outbox.embedded.models import EmbeddedMessage
from outbox.testing.factories import CheckBackFactory
from project.demo import report
from project.demo.brokers import Embedded
from project.demo.kills import CELERY, CONFIRMED, DECIDED, HALF_SENT, LONG_RUNNING, UNACKED, WRITTEN, Kill
from project.demo.outage import Outage
from project.demo.rocketmq import RocketMQ
from project.shop.messages import OrderPlaced, OrderShipped
from project.shop.models import CartEntry, Customer, Letter, Order, PointsEntry, Refusal, Shipment
from tests.factories import BatchFactory, message_id

pytestmark = pytest.mark.django_db

INVOICE = "536365"
EMBEDDED = Embedded()
KILLS = report.Kills(long_running=4, celery=4, consumers=8, unacked=6)


def handled(receipt, *groups, delivery_count=1):
    """Write what broker and consumers write about a message that reached these groups."""
    now = timezone.now()
    EmbeddedMessage.objects.create(
        topic_id=1,
        queue=0,
        pos=EmbeddedMessage.objects.count() + 1,
        message_id=str(receipt.message_id),
        source="here",
        half_id=1,
        key=receipt.key,
        tag="",
        headers="{}",
        body=b"{}",
        stored_at=now,
    )
    for group in groups:
        models.Inbox.objects.create(
            consumer_group=group,
            idempotency_key=str(receipt.message_id),
            message_id=receipt.message_id,
            topic=receipt.topic,
            delivery_count=delivery_count,
        )


@pytest.fixture
def order():
    """An order of which everything is done as it should be."""
    customer = Customer.objects.create(number="17850", country="United Kingdom")
    total = Decimal("139.12")
    with atomic():
        order = Order.objects.create(
            invoice=INVOICE, customer=customer, country="United Kingdom", invoiced_at=timezone.now(), total=total
        )
        placed = publish(OrderPlaced(invoice=INVOICE, customer="17850", items=7, total=total), about=order)
        shipment = Shipment.objects.create(invoice=INVOICE, items=7)
        shipped = publish(OrderShipped(invoice=INVOICE, customer="17850", shipment_id=shipment.pk), about=shipment)
    CartEntry.objects.create(invoice=INVOICE, change=7)
    CartEntry.objects.create(invoice=INVOICE, change=-7)
    PointsEntry.objects.create(customer_number="17850", invoice=INVOICE, points=139)
    Letter.objects.create(invoice=INVOICE, text="Dear 17850")
    handled(placed, "cart", "points", "shipment")
    handled(shipped, "letters")
    models.Ticket.objects.all().delete()
    return order


def read(kills=KILLS, broker=EMBEDDED):
    connection = database.raw("default")
    broker.show(connection)
    return report.read(connection, kills, broker.doors)


def ask_back(answer, door):
    CheckBackFactory(request_id=f"{door} {answer}", asked_by=door, answer=answer)


def count_open(kills=KILLS, broker=EMBEDDED):
    return broker.count_open(database.raw("default"), kills)


class TestRead:
    def test_finds_nothing_wrong_where_all_is_well(self, order):
        found = read()

        assert (found.orders, found.published, found.half_messages, found.handled) == (1, 2, 2, 4)
        assert (found.lost, found.ghosts, found.applied_twice) == (0, 0, 0)
        assert found.is_kept
        assert count_open() == 0

    def test_finds_nothing_in_an_empty_database(self):
        found = read(report.Kills())

        assert (found.orders, found.p99_ms, found.is_kept) == (0, 0.0, True)

    def test_reads_how_long_messages_took(self, order):
        published_at = models.MessageRow.objects.order_by("id").first().created_at
        models.Inbox.objects.update(handled_at=published_at + timedelta(seconds=2))

        assert read().p50_ms == pytest.approx(2000, abs=50)

    def test_counts_redeliveries(self, order):
        models.Inbox.objects.filter(consumer_group="cart").update(delivery_count=2)
        models.Duplicate.objects.create(consumer_group="points", message_id=message_id(), topic="orders", delivery_count=2)

        found = read()

        assert (found.redelivered, found.duplicates_dropped) == (2, 1)

    def test_counts_copies_that_the_broker_made(self, order):
        connection = database.raw("default")
        EMBEDDED.show(connection)
        connection.execute("CREATE TEMP TABLE copies AS SELECT * FROM demo_visible UNION ALL SELECT * FROM demo_visible")
        connection.execute("CREATE OR REPLACE TEMP VIEW demo_visible AS SELECT message_id, key FROM copies")

        found = report.read(connection, KILLS, EMBEDDED.doors)

        assert found.duplicate_copies == 2
        assert found.is_kept

    def test_counts_orders_that_were_rolled_back(self, order):
        Refusal.objects.create(what="payment", invoice="536366", reason="declined", content={})
        Refusal.objects.create(what="line", invoice="536366", reason="price 0", content={})

        found = read()

        assert (found.rolled_back, found.refused_lines) == (1, 1)

    def test_counts_what_was_answered_over_http(self, order):
        for answer, door in [("COMMIT", "endpoint"), ("ROLLBACK", "endpoint"), ("COMMIT", "embedded")]:
            ask_back(answer, door)

        assert read().check_backs == {"commit": 1, "rollback": 1, "unknown": 0}


class TestLost:
    @pytest.mark.parametrize(
        "ledger",
        [CartEntry.objects.filter(change__lt=0), PointsEntry.objects.all(), Shipment.objects.all(), Letter.objects.all()],
        ids=["cart", "points", "shipment", "letters"],
    )
    def test_is_an_order_without_one_of_its_effects(self, order, ledger):
        ledger.all().delete()

        found = read()

        assert found.lost == 1
        assert not found.is_kept

    @pytest.mark.parametrize("group", ["cart", "points", "shipment", "letters"])
    def test_is_a_message_that_one_group_has_not_handled(self, order, group):
        models.Inbox.objects.filter(consumer_group=group).delete()

        assert read().lost == 1

    def test_is_an_order_that_was_never_published(self, order):
        models.MessageRow.objects.filter(about=f"shop.order:{order.pk}").delete()

        assert read().lost == 1

    def test_is_not_the_points_of_a_guest(self, order):
        Order.objects.update(customer=None)
        PointsEntry.objects.all().delete()

        assert read().lost == 0


class TestGhosts:
    def test_are_messages_a_consumer_could_see_that_were_never_committed(self, order):
        receipt = publish_and_roll_back()

        handled(receipt)

        assert read().ghosts == 1
        assert not read().is_kept

    def test_are_counted_once_however_far_they_came(self, order):
        receipt = publish_and_roll_back()

        handled(receipt, "cart", "points")
        CartEntry.objects.create(invoice=receipt.key, change=-1)

        assert read().ghosts == 1

    def test_are_effects_for_an_order_that_was_never_placed(self, order):
        Letter.objects.create(invoice="536366", text="Dear nobody")

        assert read().ghosts == 1


class TestAppliedTwice:
    def test_counts_effects_beyond_the_first(self, order):
        for _ in range(2):
            PointsEntry.objects.create(customer_number="17850", invoice=INVOICE, points=139)

        found = read()

        assert found.applied_twice == 2
        assert not found.is_kept

    def test_counts_a_cart_that_was_cleared_twice(self, order):
        CartEntry.objects.create(invoice=INVOICE, change=-7)

        assert read().applied_twice == 1


class TestCountOpen:
    def test_counts_a_message_that_waits_for_a_relay(self, order):
        with atomic():
            publish(OrderPlaced(invoice="536366", customer=None, items=1, total=Decimal(1)))

        assert count_open() == 1

    def test_counts_what_rocketmq_has_not_brought_to_each_group(self, order):
        broker = RocketMQ()
        unacked = replace(KILLS, unacked=1)
        before = count_open(replace(KILLS, unacked=0), broker)

        models.Inbox.objects.filter(consumer_group="letters").delete()

        assert before == 0
        assert count_open(replace(KILLS, unacked=0), broker) == 1
        assert count_open(unacked, broker) == 2
        models.Duplicate.objects.create(consumer_group="points", message_id=message_id(), topic="orders", delivery_count=2)
        assert count_open(unacked, broker) == 1

    def test_counts_a_rollback_of_which_rocketmq_has_not_asked_yet(self, order):
        undecided = replace(KILLS, unacked=0, undecided=2)

        assert count_open(undecided, RocketMQ()) == 1
        ask_back("ROLLBACK", "broker")
        assert count_open(undecided, RocketMQ()) == 0

    def test_leaves_a_batch_on_rocketmq_to_its_check_back(self, order):
        BatchFactory(state=models.State.PREPARED)

        assert count_open(replace(KILLS, unacked=0), RocketMQ()) == 0
        assert count_open() > 0


class TestMissing:
    def test_is_nothing_where_all_was_shown(self, order):
        found = replace(read(), rolled_back=3, check_backs={"commit": 3, "rollback": 3, "unknown": 0})

        assert found.missing() == []

    @pytest.mark.parametrize(
        ("kills", "text"),
        [
            (replace(KILLS, long_running=1), "kills of the long-running relay: 1 instead of 2 or more"),
            (replace(KILLS, celery=1), "kills of Celery's relay: 1 instead of 2 or more"),
            (replace(KILLS, long_running=2, celery=2), "kills of relays: 4 instead of 5 or more"),
            (replace(KILLS, unacked=4), "kills of consumers before the ack: 4 instead of 5 or more"),
        ],
    )
    def test_names_kills_that_did_not_happen(self, order, kills, text):
        found = replace(read(kills), rolled_back=3, check_backs={"commit": 3, "rollback": 3, "unknown": 0})

        assert found.missing() == [text]

    def test_names_check_backs_that_did_not_happen(self, order):
        found = replace(read(), rolled_back=3, check_backs={"commit": 2, "rollback": 0, "unknown": 9})

        assert [text.partition(":")[0] for text in found.missing()] == [
            "check-backs answered COMMIT",
            "check-backs answered ROLLBACK",
        ]

    def test_asks_a_broker_of_one_phase_for_copies_and_for_its_own_kill(self, order):
        shown = replace(
            read(replace(KILLS, unmarked=3)),
            rolled_back=3,
            two_phase=False,
            duplicate_copies=3,
            outage=Outage(held=10, seconds=8.5, invoices=20),
        )

        assert shown.missing() == []
        assert [text.partition(":")[0] for text in replace(shown, kills=KILLS, duplicate_copies=0, outage=None).missing()] == [
            "kills of relays between confirm and mark",
            "duplicate copies",
            "kills of the broker",
            "messages in queues of dead consumers when the broker was killed",
        ]


class TestKills:
    def test_are_counted_by_whom_they_hit(self):
        done = [
            (Kill(LONG_RUNNING, HALF_SENT), 1),
            (Kill(CELERY, DECIDED), 2),
            (Kill(CELERY, CONFIRMED), 5),
            (Kill("cart", UNACKED), 3),
            (Kill("cart", WRITTEN), 4),
        ]

        kills = report.Kills.count(done)

        assert kills == report.Kills(long_running=1, celery=2, consumers=2, undecided=1, unmarked=1, unacked=1)
        assert kills.total == 5


class TestAsDict:
    def test_has_what_the_demo_promises_to_print(self, order):
        wanted = {"orders", "rolled_back", "published", "half_messages", "check_backs", "kills", "redelivered"}
        wanted |= {"duplicate_copies", "duplicates_dropped", "lost", "ghosts", "applied_twice", "p50_ms", "p99_ms"}

        found = read().as_dict()

        assert wanted <= set(found)
        assert found["kills"] == 16


def publish_and_roll_back():
    with atomic():
        receipt = publish(OrderPlaced(invoice="536366", customer=None, items=1, total=Decimal(1)))
        set_rollback(True)
    return receipt

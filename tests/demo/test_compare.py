"""What a comparison counts, refuses and plans; tests/journeys/test_compare.py plays one."""

import io
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from outbox import database
from project.demo.compare import report
from project.demo.compare.kills import RELAY, ROUNDS, WEB, WORKER, environment
from project.demo.compare.stage import Options, play
from project.demo.interrupt import Interrupt
from project.demo.kills import LONG_RUNNING, UNACKED, Kill, Permits
from project.demo.processes import DemoError
from project.demo.screen import Screen
from project.servers.rabbitmq import RabbitMQ
from project.shop.models import Cancellation, CartEntry, Customer, Letter, Order, PointsEntry, Refusal, Shipment

INVOICE = "536365"
GOOD = report.Day(orders=1, rolled_back=0, failed_requests=0, planned=10, kills=10, lost=0, ghosts=0, early=0, applied_twice=0)
SHOWN = {
    "delay": replace(GOOD, ghosts=3, applied_twice=2),
    "on_commit": replace(GOOD, lost=3, applied_twice=2),
    "outbox": GOOD,
}


def place(invoice=INVOICE):
    customer, _ = Customer.objects.get_or_create(number="17850", country="United Kingdom")
    Order.objects.create(invoice=invoice, customer=customer, country="", invoiced_at=timezone.now(), total=Decimal(1))


def handle(invoice=INVOICE):
    CartEntry.objects.create(invoice=invoice, change=-7)
    PointsEntry.objects.create(customer_number="17850", invoice=invoice, points=139)
    Shipment.objects.create(invoice=invoice, items=7)
    Letter.objects.create(invoice=invoice, text="Dear 17850")


@pytest.mark.django_db
class TestTheReport:
    @pytest.fixture(autouse=True)
    def watched(self, db):
        database.raw("default").execute(report.WATCH)

    def read(self):
        day = report.read(database.raw("default"), failed_requests=0, planned=0, kills=0)
        return day.lost, day.ghosts, day.early, day.applied_twice

    def test_finds_nothing_wrong_with_an_order_that_was_handled(self):
        place()
        handle()

        assert self.read() == (0, 0, 0, 0)

    def test_does_not_take_what_fills_a_cart_for_a_ghost(self):
        CartEntry.objects.create(invoice=INVOICE, change=7)

        assert self.read() == (0, 0, 0, 0)

    @pytest.mark.parametrize("effects", [CartEntry, PointsEntry, Shipment, Letter])
    def test_counts_an_order_as_lost_that_lacks_an_effect(self, effects):
        place()
        handle()
        effects.objects.all().delete()

        assert self.read() == (1, 0, 0, 0)

    def test_counts_a_cancellation_as_lost_whose_points_were_not_taken_back(self):
        customer = Customer.objects.create(number="17850", country="")
        Cancellation.objects.create(
            invoice="C536379", customer=customer, country="", invoiced_at=timezone.now(), total=Decimal(1)
        )

        assert self.read() == (1, 0, 0, 0)

    def test_counts_an_order_once_as_a_ghost_that_was_shipped_and_rolled_back(self):
        handle()

        assert self.read() == (0, 1, 0, 0)

    def test_counts_an_order_as_too_early_that_was_placed_after_its_effects(self):
        handle()
        place()

        assert self.read() == (0, 0, 1, 0)

    def test_counts_each_effect_that_came_again(self):
        place()
        for _ in range(3):
            handle()

        assert self.read() == (0, 0, 0, 8)

    def test_counts_nothing_of_another_way(self):
        place()
        handle("C536379")
        Refusal.objects.create(what=Refusal.What.PAYMENT, invoice=INVOICE, reason="", content={})

        database.raw("default").execute("SET CONSTRAINTS ALL IMMEDIATE")  # TRUNCATE takes no table with deferred ones
        database.raw("default").execute(report.CLEAR)

        day = report.read(database.raw("default"), failed_requests=0, planned=0, kills=0)
        assert day == replace(GOOD, orders=0, planned=0, kills=0)


class TestMissing:
    def test_is_empty_where_all_was_shown(self):
        assert report.missing(SHOWN) == []

    @pytest.mark.parametrize(
        ("way", "field", "said"),
        [
            ("delay", "ghosts", "ghosts with delay()"),
            ("delay", "applied_twice", "effects applied twice with delay()"),
            ("on_commit", "lost", "lost orders with on_commit"),
            ("on_commit", "applied_twice", "effects applied twice with on_commit"),
        ],
    )
    def test_names_what_did_not_go_wrong_without_an_outbox(self, way, field, said):
        days = {**SHOWN, way: replace(SHOWN[way], **{field: 0})}

        assert report.missing(days) == [said]

    def test_names_kills_that_did_not_happen(self):
        assert report.missing({**SHOWN, "outbox": replace(GOOD, kills=8)}) == ["2 kills with outbox"]


class TestTheKills:
    def test_are_the_same_for_consumers_as_for_celerys_worker(self, tmp_path):
        permits = Permits(tmp_path)
        place = f"{UNACKED}.cart"
        program = f"from outbox.failpoints import failpoint; failpoint({place!r})"
        permits.grant(Kill("cart", UNACKED))

        done = subprocess.run([sys.executable, "-c", program], env=environment(WORKER, permits), check=False)

        assert done.returncode == -9
        assert permits.is_used(Kill("cart", UNACKED))

    def test_are_all_within_reach_of_a_process(self, tmp_path):
        permits = Permits(tmp_path)
        with_outbox = [environment(name, permits) for name in (WEB, LONG_RUNNING, "cart", "points", "shipment", "letters")]
        without = [environment(name, permits) for name in (WEB, WORKER)]

        for kill in {kill for kills in ROUNDS for kill in kills}:
            assert any(str(permits.path(kill)) in str(one) for one in with_outbox)
            assert kill == RELAY or any(str(permits.path(kill)) in str(one) for one in without)


class TestOptions:
    @pytest.mark.parametrize(
        "given",
        [["--serve"], ["--no-kills"], ["--celery-broker", "redis://"], ["--broker", "rocketmq"]],
        ids=lambda given: given[0],
    )
    def test_that_have_no_meaning_are_refused(self, given):
        with pytest.raises(CommandError, match=rf"{given[0]} cannot be used with --compare, which always starts a RabbitMQ"):
            call_command("outbox_demo", "--compare", *given)


class TestAMachineWithoutRabbitMQ:
    def test_says_what_to_install(self, monkeypatch, signal_handlers):
        monkeypatch.setattr(RabbitMQ, "command", "no-rabbitmq-server")

        with pytest.raises(DemoError, match="apt-get install rabbitmq-server"):
            play(Options(invoices=[]), Screen(io.StringIO()), Interrupt())

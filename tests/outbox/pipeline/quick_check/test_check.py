"""Real tables: published, relayed, handled; then rows are taken away."""

from datetime import timedelta

import pytest
from django.db import connection

from outbox.models import Lane
from outbox.pipeline.errors import WindowTooLarge
from outbox.pipeline.quick_check.check import quick_check
from outbox.pipeline.quick_check.frames import opened
from project.shop.models import Order
from tests.outbox.pipeline.audit_runs.stories import handle, relay

pytestmark = pytest.mark.django_db(transaction=True)

NOW = timedelta(0)
HOUR = timedelta(hours=1)

MAKE_OLD = "UPDATE outbox_batch SET claimed_at = now() - interval '3 hours', sent_at = now() - interval '3 hours'"


@pytest.fixture(autouse=True)
def _two_groups(settings):
    """Only what these tests are about: no business rows, and the groups that read orders."""
    settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"AUDIT": {}}}


def run(statement, arguments=()):
    with connection.cursor() as cursor:
        cursor.execute(statement, arguments)


def went_all_the_way(count):
    ids = relay(count)
    for group in ("cart", "points", "shipment"):
        handle(group)
    return ids


def checked(**options):
    return quick_check("default", **{"length": HOUR, "settle": NOW, **options})


def said(answer):
    return [(str(one.kind), str(one.stage), one.group, one.first, one.last, one.ids) for one in answer.findings]


class TestAQuickCheck:
    def test_finds_nothing_where_nothing_is_wrong(self):
        ids = went_all_the_way(5)

        answer = checked()

        assert said(answer) == []
        assert (answer.rows["places"], answer.rows["broker"], answer.rows["inbox"]) == (5, 5, 15)
        assert {(hop, group) for _, hop, group, *_ in answer.histograms} >= {("store", ""), ("handle", "points")}
        assert len(ids) == 5

    def test_finds_what_is_gone_at_each_hop(self):
        ids = went_all_the_way(8)
        run("DELETE FROM outbox_embedded_message WHERE message_id = %s", [str(ids[1])])
        run("DELETE FROM outbox_inbox WHERE message_id = %s", [ids[1]])
        run("DELETE FROM outbox_inbox WHERE message_id = %s AND consumer_group = 'cart'", [ids[4]])
        Lane.objects.update(last_seq=10)

        assert said(checked()) == [
            ("lost", "broker", "", 2, 2, (str(ids[1]),)),
            ("lost", "inbox", "cart", 5, 5, (str(ids[4]),)),
            ("lost", "outbox", "", 9, 10, ()),
        ]

    def test_leaves_alone_what_is_under_way(self):
        relay(3)

        assert said(checked(settle=HOUR)) == []

    def test_says_what_is_late(self):
        went_all_the_way(1)
        relay(2)

        assert {(kind, group) for kind, _, group, *_ in said(checked())} == {
            ("late", "cart"),
            ("late", "points"),
            ("late", "shipment"),
        }

    def test_looks_at_its_window_only(self):
        old = went_all_the_way(2)
        run(MAKE_OLD)
        run("DELETE FROM outbox_inbox WHERE message_id = %s", [old[0]])
        new = went_all_the_way(2)
        run("DELETE FROM outbox_inbox WHERE message_id = %s AND consumer_group = 'cart'", [new[0]])

        found = [one for one in said(checked()) if one[0] != "clock"]  # claimed, it seems, before they were published

        assert found == [("lost", "inbox", "cart", 3, 3, (str(new[0]),))]

    def test_holds_business_rows_to_their_messages(self, settings):
        entry = {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", "AT": "placed_at"}
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"AUDIT": {"orders": entry}}}
        order = Order.objects.create(invoice="1", country="UK", invoiced_at="2026-01-01T00:00Z", total=1)

        (found,) = checked().findings
        assert (str(found.kind), found.subject, found.about) == ("lost", "orders", (f"shop.order:{order.pk}",))

        run("UPDATE shop_order SET placed_at = now() - interval '50 minutes'")  # its message may lie before the window

        assert checked().findings == []

    @pytest.mark.parametrize(
        ("entry", "note"),
        [
            ({"WHERE": "b.no_such > 0", "AT": "placed_at"}, "The rows of orders cannot be read: column b.no_such does not exist"),
            ({}, 'The rows of orders were not looked at: OUTBOX["PIPELINE"]["AUDIT"] names no AT for them.'),
        ],
    )
    def test_says_which_rows_it_could_not_look_at(self, settings, entry, note):
        audit = {"orders": {"MODEL": "shop.Order", "EXPECTS": "OrderPlaced", **entry}}
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"AUDIT": audit}}
        went_all_the_way(1)

        answer = checked()

        assert (answer.notes, answer.findings) == ([note], [])


class TestItsBounds:
    def test_are_rows(self):
        went_all_the_way(3)

        with pytest.raises(WindowTooLarge, match="more than 2 rows"):
            checked(limit=2)

    def test_are_numbers_given_out(self):
        went_all_the_way(1)
        Lane.objects.update(last_seq=10**12)

        with pytest.raises(WindowTooLarge, match=r"gave out more than 100,000 numbers"):
            checked()

    def test_are_seconds(self):
        with opened("default", limit=10, seconds=0.3) as (check, _), pytest.raises(WindowTooLarge, match="takes too long"):
            check.run("SELECT pg_sleep(30)")

    def test_are_kept_by_all_statements_together(self):
        with pytest.raises(WindowTooLarge, match="takes too long"):
            checked(seconds=0)

    def test_leave_nothing_behind(self):
        checked()

        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_class WHERE relname LIKE 'quick\\_%'")
            assert cursor.fetchone() == (0,)

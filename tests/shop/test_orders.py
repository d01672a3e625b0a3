"""The shop's orders from the view to the last handler, by the public testing kit alone. docs/how-to/test.md quotes this."""

from datetime import timedelta
from decimal import Decimal

import pytest

from outbox import atomic as outbox_atomic
from outbox import publish
from outbox.check_backs import COMMIT, ROLLBACK, UNKNOWN
from outbox.testing.factories import TicketFactory
from project.shop.messages import OrderPlaced, OrderShipped
from project.shop.models import CartEntry, Letter, Order, PointsEntry, Shipment

ORDER = OrderPlaced(invoice="536365", customer="17850", items=1, total=Decimal("15.30"))


class TestPlacingAnOrder:
    def test_tells_the_others(self, submit, outbox):
        submit("orders")

        outbox.assert_published(OrderPlaced, invoice="536365", items=1)

    def test_says_whom_it_is_about(self, submit, outbox):
        submit("orders")

        [placed] = outbox.published(OrderPlaced)
        assert placed.message.total == Decimal("15.30")
        assert (placed.topic, placed.key, placed.tag) == ("orders", "536365", "placed")
        assert placed.about == f"shop.order:{Order.objects.get().pk}"

    def test_tells_nobody_when_the_payment_is_declined(self, submit, outbox):
        submit("orders", payment="declined")

        outbox.assert_nothing_published()

    def test_leads_to_points_a_shipment_and_a_letter(self, submit, outbox):
        submit("orders")

        outbox.run_until_idle()

        assert PointsEntry.objects.get().points == 15
        outbox.assert_published(OrderShipped, shipment_id=Shipment.objects.get().pk)
        assert Letter.objects.get().text == "Dear 17850, your order 536365 is on its way."


class TestPublishingByHand:
    def test_leads_to_points(self, outbox):
        with outbox_atomic():
            publish(ORDER)

        outbox.run_until_idle()

        assert PointsEntry.objects.count() == 1


class TestAConsumer:
    def test_handles_a_message_once_however_often_it_comes(self, outbox):
        outbox.deliver(ORDER, times=3)

        assert CartEntry.objects.count() == 1

    def test_gives_up_what_can_never_be_handled(self, outbox):
        outbox.deliver(OrderPlaced(invoice="536366", customer="17850", items=1, total=Decimal(0)))

        [letter] = outbox.dead_letters("points")
        assert "points are given for what was paid" in letter.error

    def test_tries_again_later(self, submit, outbox, monkeypatch):
        submit("orders")
        with monkeypatch.context() as broken:
            broken.setattr(Letter.objects, "create", out_of_paper)
            outbox.run_until_idle(raise_errors=False)
        assert not Letter.objects.exists()

        outbox.advance(timedelta(seconds=1))
        outbox.run_until_idle()

        assert Letter.objects.count() == 1


def out_of_paper(**letter):
    raise RuntimeError("out of paper")


class TestAKilledRelay:
    def test_leaves_no_order_untold(self, submit, outbox):
        submit("orders")
        with outbox.crash("after_half"):
            outbox.run_until_idle()

        outbox.run_until_idle()

        assert PointsEntry.objects.count() == 1

    def test_leaves_its_half_message_to_the_check_back(self, submit, outbox):
        submit("orders")
        with outbox.crash("after_half"):
            outbox.run_until_idle()
        assert len(outbox.pending_check_backs()) == 1
        assert outbox.check_back() == [UNKNOWN]  # another relay may be about to decide

        outbox.advance(timedelta(minutes=1))

        assert outbox.check_back() == [ROLLBACK]
        assert outbox.pending_check_backs() == []

    def test_has_its_decision_carried_out_by_the_check_back(self, submit, outbox):
        submit("orders")
        with outbox.crash("after_decide"):
            outbox.run_until_idle()

        assert outbox.check_back() == [COMMIT]
        outbox.run_until_idle()

        assert PointsEntry.objects.count() == 1


class TestAKilledConsumer:
    @pytest.mark.parametrize("place", ["consumer.before_handler", "consumer.after_handler", "consumer.after_commit"])
    def test_has_its_work_done_once(self, submit, outbox, place):
        submit("orders")
        with outbox.crash(place):
            outbox.run_until_idle()

        outbox.advance(timedelta(minutes=2))  # its broker gives up waiting for it
        outbox.run_until_idle()

        assert [CartEntry.objects.count(), PointsEntry.objects.count(), Shipment.objects.count()] == [1, 1, 1]


class TestABrokerThatIsAway:
    def test_loses_nothing(self, submit, outbox):
        outbox.broker.fail("send_halves", "unavailable", times=None)
        submit("orders")
        outbox.run_until_idle()
        assert not PointsEntry.objects.exists()

        outbox.broker.heal()
        outbox.advance(timedelta(minutes=1))
        outbox.run_until_idle()

        assert PointsEntry.objects.count() == 1


class TestAMessageThatWaits:
    def test_is_handled_as_if_it_had_been_published(self, outbox):
        TicketFactory(of=ORDER)

        outbox.run_until_idle()

        assert PointsEntry.objects.count() == 1

"""The same kit for unittest. docs/how-to/test.md quotes this."""

# ruff: noqa: PT009

import json
from datetime import timedelta

from django.test import TestCase, TransactionTestCase

from outbox.testing import OutboxTestMixin
from project.shop.messages import OrderPlaced
from project.shop.models import PointsEntry
from tests.shop.conftest import INVOICE


class OrderTests(OutboxTestMixin, TestCase):
    def setUp(self):
        super().setUp()
        self.client.post("/shop/orders/", json.dumps(INVOICE), content_type="application/json")

    def test_tells_the_others(self):
        self.outbox.assert_published(OrderPlaced, invoice="536365")

    def test_leads_to_points(self):
        self.outbox.run_until_idle()

        self.assertEqual(PointsEntry.objects.get().points, 15)


class CommittedOrderTests(OutboxTestMixin, TransactionTestCase):
    def test_arrives_though_its_consumer_was_killed(self):
        self.client.post("/shop/orders/", json.dumps(INVOICE), content_type="application/json")
        with self.outbox.crash("consumer.after_handler"):
            self.outbox.run_until_idle()
        self.assertFalse(PointsEntry.objects.exists())

        self.outbox.advance(timedelta(minutes=2))
        self.outbox.run_until_idle()

        self.assertEqual(PointsEntry.objects.get().points, 15)

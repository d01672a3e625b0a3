"""docs/how-to/half-first.md, run as it stands."""

from __future__ import annotations

from types import SimpleNamespace

from django.db import connection, models
from django.http import JsonResponse
from django.test.utils import isolate_apps

from outbox import Message
from outbox.models import Batch
from tests.quotes import python_blocks


class OrderPlaced(Message):
    order_id: int
    customer: str

    class Meta:
        topic = "orders"
        type = "OrderOfThePage"


class TestThePage:
    @isolate_apps("project.shop")
    def test_shows_what_works(self, broker):
        class Order(models.Model):  # noqa: DJ008
            customer = models.TextField()

            class Meta:
                app_label = "shop"
                db_table = "shop_order_of_the_page"

        names = {"Order": Order, "OrderPlaced": OrderPlaced, "JsonResponse": JsonResponse}
        view, block = python_blocks("how-to/half-first.md")
        with connection.schema_editor() as editor:
            editor.create_model(Order)
        try:
            exec(view, names)  # noqa: S102
            names["place_order"](SimpleNamespace(POST={"customer": "Bob"}))
            # The page's sequence is the shop's, which other tests have used: a fixed key may be the one that Bob got.
            names["key"] = Order.objects.get().pk + 1
            exec(block, names)  # noqa: S102

            assert sorted(Order.objects.values_list("customer", flat=True)) == ["Ann", "Bob"]
            assert list(Batch.objects.values_list("state", flat=True)) == [3, 3]
        finally:
            with connection.schema_editor() as editor:
                editor.delete_model(Order)

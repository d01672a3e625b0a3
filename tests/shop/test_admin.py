import pytest
from django.apps import apps
from django.contrib import admin
from django.urls import reverse

from project.shop.models import Cancellation, Order

pytestmark = pytest.mark.django_db

BOOKS = sorted(model._meta.model_name for model in apps.get_app_config("shop").get_models() if admin.site.is_registered(model))


class TestAdmin:
    @pytest.mark.parametrize("book", BOOKS)
    def test_shows_each_book_and_lets_nobody_write_it(self, admin_client, book):
        shown = admin_client.get(reverse(f"admin:shop_{book}_changelist"))
        added = admin_client.get(reverse(f"admin:shop_{book}_add"))

        assert (shown.status_code, added.status_code) == (200, 403)

    @pytest.mark.parametrize("model", [Order, Cancellation])
    def test_shows_one_invoice_with_its_lines(self, admin_client, model):
        one = model.objects.create(invoice="536365", country="France", total=1, invoiced_at="2010-12-01T08:26:00Z")

        page = admin_client.get(reverse(f"admin:shop_{model._meta.model_name}_change", args=[one.pk]))

        assert page.status_code == 200
        assert "<textarea" not in page.text

    def test_is_where_the_address_alone_leads(self, admin_client):
        assert admin_client.get("/").url == "/admin/"

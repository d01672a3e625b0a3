"""The messages about a row, on the page that a project's admin has for it."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from django import forms
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import path, reverse

from outbox.admin import MessagesAboutMixin
from outbox.admin.messages import MessageAdmin
from outbox.ids import topic_number
from outbox.models import MessageRow, State, Topic
from outbox.testing.factories import DeferredFactory
from project.shop.models import Cancellation, Order, Shipment
from tests.factories import BatchFactory, MessageRowFactory, message_id
from tests.quotes import python_blocks

pytestmark = [pytest.mark.django_db(databases=["default", "other"]), pytest.mark.urls(__name__)]

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HEAD = '<th scope="col">Message</th>'


class OrderAdmin(MessagesAboutMixin, admin.ModelAdmin):
    fields = ["invoice", ("country", "messages_about"), "total"]

    class Media:
        css = {"all": ["shop.css"]}


class ShipmentAdmin(MessagesAboutMixin, admin.ModelAdmin):
    readonly_fields = ["shipped_at"]


class CancellationAdmin(MessagesAboutMixin, admin.ModelAdmin):
    fieldsets = [("Messages", {"fields": ["messages_about"]}), ("Else", {"fields": ["invoice"]})]


site = admin.AdminSite(name="operators")
site.register(MessageRow, MessageAdmin)
site.register(Order, OrderAdmin)
site.register(Shipment, ShipmentAdmin)
site.register(Cancellation, CancellationAdmin)

bare = admin.AdminSite(name="bare")
bare.register(Shipment, ShipmentAdmin)

urlpatterns = [path("admin/", admin.site.urls), path("operators/", site.urls), path("bare/", bare.urls)]


class NoOutboxInOther:
    def allow_migrate(self, db, app_label, **hints):
        return False if (db, app_label) == ("other", "outbox") else None


@pytest.fixture
def shipment():
    return Shipment.objects.create(invoice="536365", items=1)


@pytest.fixture
def about(orders):
    """Publish a message about a row, some seconds after noon."""

    def about(row, second=0, *, state=State.SENT, **fields):
        at = NOON + timedelta(seconds=second)
        one = MessageRowFactory(
            topic=orders, id=message_id(at), created_at=at, about=f"{row._meta.label_lower}:{row.pk}", **fields
        )
        BatchFactory(topic=orders, message_ids=[one.id], state=state)
        return one

    return about


@pytest.fixture
def staff():
    """Log a member of the staff in who may see and change the shop's rows, and has these permissions."""

    def staff(*codenames):
        user = User.objects.create_user("ada", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(content_type__app_label="shop"))
        user.user_permissions.add(*Permission.objects.filter(content_type__app_label="outbox", codename__in=codenames))
        client = Client()
        client.force_login(user)
        return client

    return staff


def page_of(client, row, site="operators"):
    page = client.get(reverse(f"{site}:shop_{row._meta.model_name}_change", args=[row.pk], current_app=site))
    assert page.status_code == 200
    return page.text


class TestThePageOfARow:
    def test_shows_its_messages_newest_first_with_links(self, shipment, about, staff):
        old = about(shipment, 0, headers=json.dumps({"ce-type": "OrderShipped"}))
        new = about(shipment, 1, state=State.DEAD, headers='{"ce-type": "<b>"}')
        about(Shipment(pk=shipment.pk + 10), key="536365")

        page = page_of(staff("view_messagerow"), shipment)

        links = [reverse("operators:outbox_messagerow_change", args=[one.id]) for one in (new, old)]
        assert page.index(links[0]) < page.index(links[1])
        assert page.count('class="outbox-id"') == 2
        for text in ("2026-03-01 12:00:01", ">dead</span>", ">sent</span>", "<bdi>orders</bdi>", "<bdi>OrderShipped</bdi>"):
            assert text in page
        assert "<bdi>&lt;b&gt;</bdi>" in page
        assert "outbox/admin.css" in page

    def test_shows_what_a_group_gave_up(self, shipment, about, staff):
        DeferredFactory(message_id=about(shipment).id, dead=True)

        assert "for group points</span>" in page_of(staff("view_messagerow"), shipment)

    def test_shows_the_newest_and_leads_to_all(self, shipment, about, staff, monkeypatch):
        monkeypatch.setattr("outbox.admin.about.SHOWN", 2)
        rows = [about(shipment, second) for second in range(3)]

        page = page_of(client := staff("view_messagerow"), shipment)

        url = f"{reverse('operators:outbox_messagerow_changelist')}?q=shop.shipment%3A{shipment.pk}"
        assert str(rows[0].id) not in page
        assert f'The newest 2. <a href="{url}">All messages about this row</a>' in page
        assert len(client.get(url).context["cl"].result_list) == 3

    def test_says_that_there_are_none(self, shipment, staff):
        assert "None: none were published, or all were pruned." in page_of(staff("view_messagerow"), shipment)

    def test_can_be_saved(self, shipment, about, staff):
        about(shipment)
        url = reverse("operators:shop_shipment_change", args=[shipment.pk])

        answer = staff("view_messagerow").post(url, {"invoice": "536366", "items": "2"})

        shipment.refresh_from_db()
        assert (answer.status_code, shipment.invoice) == (302, "536366")

    def test_asks_the_database_a_few_times(self, shipment, about, staff, django_assert_max_num_queries, asked):
        for second in range(20):
            about(shipment, second)
        client = staff("view_messagerow")
        page_of(client, shipment)
        asked.clear()

        page_of(client, shipment)

        assert len([text for text, _ in asked if "outbox_" in str(text)]) == 3

    def test_says_nothing_where_a_row_is_added(self, staff):
        page = staff("view_messagerow").get(reverse("operators:shop_shipment_add")).text

        assert "messages_about" not in page

    def test_adds_to_the_files_of_the_admin_itself(self, staff, about):
        order = Order.objects.create(invoice="536365", country="France", total=1, invoiced_at=NOON)

        page = page_of(staff("view_messagerow"), order)

        assert "outbox/admin.css" in page
        assert "shop.css" in page


class TestThePlace:
    @pytest.mark.parametrize("model", [Order, Cancellation])
    def test_is_that_of_the_admin_or_none(self, model, about, staff):
        row = model.objects.create(invoice="536365", country="France", total=1, invoiced_at=NOON)
        about(row)

        page = page_of(staff("view_messagerow"), row)

        assert page.count(HEAD) == 1
        assert (page.index(HEAD) < page.index('name="invoice"')) == (model is Cancellation)

    @pytest.mark.parametrize("model", [Order, Cancellation, Shipment])
    def test_is_empty_for_users_who_may_not_view_messages(self, model, about, staff):
        values = {"country": "France", "total": 1, "invoiced_at": NOON} if model is not Shipment else {"items": 1}
        row = model.objects.create(invoice="536365", **values)
        about(row)

        page = page_of(staff("view_topic"), row)

        assert 'name="invoice"' in page
        assert "messages_about" not in page
        assert HEAD not in page

    def test_is_empty_on_a_site_without_messages(self, shipment, about, admin_client):
        about(shipment)

        assert HEAD not in page_of(admin_client, shipment, "bare")


class TestAnotherDatabase:
    @pytest.fixture
    def elsewhere(self):
        row = Shipment(pk=7)
        row._state.db = "other"
        topic = Topic.objects.using("other").get_or_create(id=topic_number("orders"), name="orders")[0]
        one = MessageRowFactory.build(topic=topic, about="shop.shipment:7")
        one.save(using="other")
        return row, one

    def test_has_the_messages_about_its_rows_without_pages(self, elsewhere, about):
        row, one = elsewhere
        about(Shipment(pk=7), key="here")

        shown = ShipmentAdmin(Shipment, site).messages_about(row)

        assert f"<bdi>{one.id}</bdi>" in shown
        assert shown.count("<tr><td>") == 1
        assert "href" not in shown

    def test_may_have_no_outbox(self, elsewhere, rf, django_user_model, settings):
        settings.DATABASE_ROUTERS = [f"{__name__}.NoOutboxInOther"]
        request = rf.get("/")
        request.user = django_user_model(is_active=True, is_superuser=True)

        fieldsets = ShipmentAdmin(Shipment, site).get_fieldsets(request, elsewhere[0])

        assert fieldsets == [(None, {"fields": ["invoice", "items", "shipped_at"]})]


class TestDocs:
    def test_show_code_that_runs(self, monkeypatch, request):
        monkeypatch.setattr("outbox.message.registered", {})
        registered = admin.site.get_model_admin(Order)
        admin.site.unregister(Order)
        request.addfinalizer(lambda: (admin.site.unregister(Order), admin.site.register(Order, type(registered))))

        for block in python_blocks("how-to/admin.md"):
            exec(block, {"Order": Order, "__name__": __name__})  # noqa: S102

        assert isinstance(admin.site.get_model_admin(Order), MessagesAboutMixin)
        assert admin.site.get_model_admin(Order).check() == []


class TestMedia:
    def test_is_joined(self):
        assert str(OrderAdmin(Order, site).media) == str(
            admin.ModelAdmin(Order, site).media + forms.Media(css={"all": ["outbox/admin.css", "shop.css"]})
        )

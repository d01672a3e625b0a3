import re
from pathlib import Path

import pytest
from django.apps import apps
from django.contrib import admin
from django.test import Client
from django.urls import reverse

from outbox import database
from outbox.admin import overview as overview_page
from outbox.admin import pages
from outbox.consuming.register import groups
from outbox.embedded.models import EmbeddedHalf
from outbox.models import CheckBack, DeadMessage, Deferred, InboxRow, MessageRow, Process, State, Topic
from outbox.pipeline.models import AuditFinding, AuditRun
from outbox.topics import pause
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory

pytestmark = pytest.mark.django_db

PAGES = {
    "outbox_overview_changelist": "view_topic",
    "outbox_topic_changelist": "view_topic",
    "outbox_messagerow_changelist": "view_messagerow",
    "outbox_deadmessage_changelist": "view_deadmessage",
    "outbox_deferred_changelist": "view_deferred",
    "outbox_embedded_embeddedhalf_changelist": "view_embeddedhalf",
    "outbox_checkback_changelist": "view_checkback",
    "outbox_inboxrow_changelist": "view_inbox",
    "outbox_pipeline_auditrun_changelist": "view_auditrun",
    "outbox_catalogue": "view_topic",
    "outbox_pipeline_auditfinding_changelist": "view_auditfinding",
}


@pytest.mark.parametrize("view", PAGES)
class TestEachPage:
    def test_is_shown_to_whoever_may_view_it(self, view, operator):
        assert operator(PAGES[view]).get(reverse(f"admin:{view}")).status_code == 200

    def test_is_closed_to_whoever_may_view_the_others_only(self, view, operator):
        others = {permission for permission in PAGES.values() if permission != PAGES[view]}

        assert operator(*others).get(reverse(f"admin:{view}")).status_code == 403

    def test_sends_strangers_to_the_login(self, view):
        answer = Client().get(reverse(f"admin:{view}"))

        assert answer.status_code == 302
        assert answer.url.startswith(reverse("admin:login"))

    def test_links_to_those_pages_only_that_the_person_may_see(self, view, operator):
        page = operator(PAGES[view]).get(reverse(f"admin:{view}")).text

        links = re.search(r'<nav class="outbox-nav".*?</nav>', page, re.DOTALL).group()
        shown = {other for other in PAGES if f'href="{reverse(f"admin:{other}")}"' in links}
        assert {PAGES[one] for one in shown} == {PAGES[view]}

    def test_says_which_topics_are_paused(self, view, admin_client):
        pause(database.raw("default"), "orders", by="ada", reason="<b>moving</b>")

        page = admin_client.get(reverse(f"admin:{view}")).text

        assert "Topic orders is paused" in page
        assert "&lt;b&gt;moving&lt;/b&gt;" in page


def ours():
    """List the models of the outbox and its apps that have pages."""
    return [one for one in apps.get_models() if one._meta.app_label.startswith("outbox") and admin.site.is_registered(one)]


class TestTheDocument:
    def test_says_of_each_page_what_it_answers(self):
        rows = Path("docs/how-to/admin.md").read_text()

        assert [page.name for page in pages.pages() if f"| {page.name} | " not in rows] == []

    def test_names_each_permission(self):
        page = Path("docs/how-to/admin.md").read_text()
        given = {codename for model in ours() for codename, _ in model._meta.permissions}

        assert [name for name in sorted(given | set(PAGES.values())) if f"`{name}`" not in page] == []


class TestAdmin:
    def test_lets_nobody_add_change_or_delete_a_row_by_hand(self, rf, admin_user):
        request = rf.get("/")
        request.user = admin_user

        for model in (AuditFinding, AuditRun, CheckBack, DeadMessage, Deferred, EmbeddedHalf, InboxRow, MessageRow, Topic):
            one = admin.site.get_model_admin(model)
            can = [one.has_add_permission(request), one.has_change_permission(request), one.has_delete_permission(request)]
            assert not any(can)
            assert "delete_selected" not in one.get_actions(request)

    def test_has_no_page_to_add_or_delete(self, admin_client):
        names = {url.name for model in ours() for url in admin.site.get_model_admin(model).get_urls()}

        assert not [name for name in names if name.endswith(("_add", "_delete"))]

    @pytest.mark.parametrize("view", ["index", "outbox"])
    def test_leads_to_the_overview(self, view, operator):
        address = reverse("admin:index") if view == "index" else reverse("admin:app_list", args=[view])

        assert reverse("admin:outbox_overview_changelist") in operator("view_topic").get(address).text
        assert reverse("admin:outbox_overview_changelist") not in operator("view_inbox", name="bea").get(address).text


class TestOverview:
    @pytest.fixture
    def overview(self, admin_client):
        return lambda: admin_client.get(reverse("admin:outbox_overview_changelist"))

    def test_counts_what_waits_and_links_to_it(self, overview, orders):
        TicketFactory.create_batch(3, topic=orders)
        BatchFactory(topic=orders, state=State.DEAD)

        page = overview()

        cards = {card["name"]: card["number"] for card in page.context["cards"]}
        assert (cards["Backlog"], cards["Dead messages"]) == (3, 1)
        assert "1 message is dead: rejected, without a row, or perhaps published." in page.text
        assert f'<a href="{reverse("admin:outbox_messagerow_changelist")}?topic=orders&amp;state=waiting">3</a>' in page.text

    def test_links_to_no_page_that_the_person_may_not_see(self, operator, orders):
        TicketFactory(topic=orders)

        page = operator("view_topic").get(reverse("admin:outbox_overview_changelist"))

        assert {card["url"] for card in page.context["cards"]} == {""}
        assert "messagerow" not in page.text

    def test_says_who_is_silent(self, overview):
        Process.objects.create(kind="relay", host="h", pid=7, broker="default", beat_at="2026-01-01T12:00:00Z")

        page = overview().text

        assert "h:7" in page
        assert "silent" in page
        assert re.search(r"Broker &#x27;default&#x27;, since Jan\. 1, 2026, [\w:. ]+:</strong> <bdi>No relay is running", page)

    def test_counts_the_silent_on_the_card_of_processes(self, overview):
        Process.objects.create(kind="relay", host="h", pid=7, beat_at="2026-01-01T12:00:00Z")
        Process.objects.create(kind="consumer", host="h", pid=8)

        page = overview()

        [card] = [one for one in page.context["cards"] if one["name"] == "Processes"]
        assert (card["number"], card["text"], card["tone"]) == (1, "running, 1 silent", "waiting")

    def test_says_which_loop_of_a_process_fails_and_why(self, overview):
        Process.objects.create(kind="consumer", consumer_group="points", host="h", pid=7, errors={"consumer": "no <b>right</b>"})

        page = overview().text

        assert '<span class="outbox-badge outbox-bad">consumer fails</span>' in page
        assert "no &lt;b&gt;right&lt;/b&gt;</bdi>. <em>" in page

    def test_shows_breakers_of_relays_only(self, overview):
        for kind in ("relay", "consumer"):
            Process.objects.create(kind=kind, host="h", pid=7)

        page = overview()

        assert [one["breaker"] for one in page.context["processes"]] == ["", "closed"]

    def test_draws_what_was_published(self, overview):
        MessageRowFactory()

        page = overview().text

        assert "In the last hour 1 messages were published and 0 handled" in page
        assert page.count("<polyline") == 2
        assert re.findall(r'<td class="outbox-number">([01])</td>', page)[:2] == ["1", "0"]
        assert not re.search(r"<svg[^>]*>.*?(style=|<script)", page, re.DOTALL)

    def test_takes_longer_than_a_projects_limit_for_statements(self, overview, monkeypatch):
        read = overview_page.read_status

        def read_slowly(connection, using):
            connection.execute("SELECT pg_sleep(0.2)")
            return read(connection, using)

        monkeypatch.setattr(overview_page, "read_status", read_slowly)
        database.raw("default").execute("SET LOCAL statement_timeout = '150ms'")

        assert overview().status_code == 200

    def test_asks_little(self, overview, asked):
        TicketFactory.create_batch(3)
        asked.clear()

        overview()

        assert len(asked) <= 29 + len(groups())

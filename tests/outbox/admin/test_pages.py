import re
from pathlib import Path

import pytest
from django.contrib import admin
from django.test import Client
from django.urls import reverse

from outbox import database
from outbox.models import CheckBack, DeadLetter, DeadMessage, EmbeddedHalf, InboxRow, MessageRow, Topic
from outbox.topics import pause

pytestmark = pytest.mark.django_db

PAGES = {
    "outbox_overview": "view_topic",
    "outbox_topic_changelist": "view_topic",
    "outbox_messagerow_changelist": "view_messagerow",
    "outbox_deadmessage_changelist": "view_deadmessage",
    "outbox_deadletter_changelist": "view_deadletter",
    "outbox_embeddedhalf_changelist": "view_embeddedhalf",
    "outbox_checkback_changelist": "view_checkback",
    "outbox_inboxrow_changelist": "view_inbox",
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


class TestTheDocument:
    def test_names_each_permission(self):
        page = Path("docs/how-to/admin.md").read_text()
        given = {
            codename
            for model in admin.site._registry
            if model._meta.app_label == "outbox"
            for codename, _ in model._meta.permissions
        }

        assert [name for name in sorted(given | set(PAGES.values())) if f"`{name}`" not in page] == []


class TestAdmin:
    def test_lets_nobody_add_change_or_delete_a_row_by_hand(self, rf, admin_user):
        request = rf.get("/")
        request.user = admin_user

        for model in (CheckBack, DeadLetter, DeadMessage, EmbeddedHalf, InboxRow, MessageRow, Topic):
            one = admin.site._registry[model]
            can = [one.has_add_permission(request), one.has_change_permission(request), one.has_delete_permission(request)]
            assert not any(can)
            assert "delete_selected" not in one.get_actions(request)

    def test_has_no_page_to_add_or_delete(self, admin_client):
        names = {
            url.name
            for model in admin.site._registry
            if model._meta.app_label == "outbox"
            for url in admin.site._registry[model].get_urls()
        }

        assert not [name for name in names if name.endswith(("_add", "_delete"))]

    def test_leads_to_the_overview(self, admin_client):
        page = admin_client.get(reverse("admin:app_list", args=["outbox"])).text

        assert reverse("admin:outbox_overview") in page

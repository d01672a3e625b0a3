"""The frame of all admin pages of the outbox: links to the other pages, and the paused topics."""

from __future__ import annotations

from typing import Any

from django.contrib.admin import AdminSite
from django.db.models import Model
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from outbox.extensions import Page, extensions
from outbox.models import CheckBack, DeadMessage, Deferred, Gap, InboxRow, MessageRow, Overview, Topic

OVERVIEW = "outbox_overview_changelist"
CATALOGUE = "outbox_catalogue"


OF_CORE = [
    Page(10, _("Overview"), Overview, OVERVIEW),
    Page(20, _("Messages"), MessageRow, "outbox_messagerow_changelist"),
    Page(30, _("Dead messages"), DeadMessage, "outbox_deadmessage_changelist"),
    Page(40, _("Deferred messages"), Deferred, "outbox_deferred_changelist"),
    Page(45, _("Gaps"), Gap, "outbox_gap_changelist"),
    Page(60, _("Check-backs"), CheckBack, "outbox_checkback_changelist"),
    Page(70, _("Inbox"), InboxRow, "outbox_inboxrow_changelist"),
    Page(80, _("Topics"), Topic, "outbox_topic_changelist"),
    Page(82, _("Catalogue"), Overview, CATALOGUE),
]


def pages() -> list[Page]:
    """Return all pages, including those of extensions, in the order of their links."""
    return sorted([*OF_CORE, *(page for extension in extensions() for page in extension.pages)])


def url_of(site: AdminSite, view: str, *args: object) -> str:
    """Return the URL of a view of an admin site."""
    return reverse(f"admin:{view}", args=args, current_app=site.name)


def topics(request: HttpRequest) -> list[Topic]:
    """Return all topics, read once per request."""
    known: list[Topic] | None = getattr(request, "_outbox_topics", None)
    if known is None:
        known = list(Topic.objects.order_by("name"))
        request._outbox_topics = known  # type: ignore[attr-defined]
    return known


def frame(site: AdminSite, request: HttpRequest) -> dict[str, Any]:
    """Return the context of every page of the outbox: links to the pages that the user may see, and the paused topics."""
    request.current_app = site.name  # {% url "admin:…" %} resolves to this admin site
    links = []
    for page in pages():
        if may_see(site, page.model, request):
            url = url_of(site, page.view)
            links.append({"name": page.name, "url": url, "is_here": request.path == url})
    return {"outbox_links": links, "outbox_paused": [topic for topic in topics(request) if topic.paused]}


def may_see(site: AdminSite, model: type[Model], request: HttpRequest) -> bool:
    """Return whether a model is registered in an admin site, and the user may view it there."""
    return site.is_registered(model) and site.get_model_admin(model).has_view_permission(request)

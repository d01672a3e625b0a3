"""What all pages of the outbox share: where else one can go, and which topics are paused."""

from __future__ import annotations

from typing import Any

from django.contrib.admin import AdminSite
from django.db.models import Model
from django.http import HttpRequest
from django.urls import reverse

from outbox.models import (
    ArchivedDay,
    AuditFinding,
    AuditRun,
    CheckBack,
    DeadLetter,
    DeadMessage,
    EmbeddedHalf,
    InboxRow,
    MessageRow,
    MonitorLane,
    Topic,
)

OVERVIEW = "outbox_overview"
QUICK_CHECK = "outbox_quick_check"

_PLACES: list[tuple[str, type[Model], str]] = [
    ("Overview", Topic, OVERVIEW),
    ("Messages", MessageRow, "outbox_messagerow_changelist"),
    ("Dead messages", DeadMessage, "outbox_deadmessage_changelist"),
    ("Dead letters", DeadLetter, "outbox_deadletter_changelist"),
    ("Half messages", EmbeddedHalf, "outbox_embeddedhalf_changelist"),
    ("Check-backs", CheckBack, "outbox_checkback_changelist"),
    ("Inbox", InboxRow, "outbox_inboxrow_changelist"),
    ("Topics", Topic, "outbox_topic_changelist"),
    ("Audits", AuditRun, "outbox_auditrun_changelist"),
    ("Findings", AuditFinding, "outbox_auditfinding_changelist"),
    ("Quick check", AuditRun, QUICK_CHECK),
    ("Monitor", MonitorLane, "outbox_monitorlane_changelist"),
    ("Archived days", ArchivedDay, "outbox_archivedday_changelist"),
]


def url_of(site: AdminSite, view: str, *args: object) -> str:
    """Give the address of a view of the admin, in the site it belongs to."""
    return reverse(f"admin:{view}", args=args, current_app=site.name)


def topics(request: HttpRequest) -> list[Topic]:
    """Give all topics, read once per request."""
    known: list[Topic] | None = getattr(request, "_outbox_topics", None)
    if known is None:
        known = list(Topic.objects.exclude(id=0).order_by("name"))
        request._outbox_topics = known  # type: ignore[attr-defined]
    return known


def frame(site: AdminSite, request: HttpRequest) -> dict[str, Any]:
    """Give the context that every page of the outbox needs: links to those the person may see, and the paused topics."""
    request.current_app = site.name  # where {% url "admin:…" %} leads
    links = []
    for name, model, view in _PLACES:
        if may_see(site, model, request):
            url = url_of(site, view)
            links.append({"name": name, "url": url, "is_here": request.path == url})
    return {"outbox_links": links, "outbox_paused": [topic for topic in topics(request) if topic.paused]}


def may_see(site: AdminSite, model: type[Model], request: HttpRequest) -> bool:
    """Say whether this admin has a model, and the person may view it there."""
    return site.is_registered(model) and site.get_model_admin(model).has_view_permission(request)

"""The admin of archived days, and the page of an archived message, whose content is read from the lake."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin import ModelAdmin
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from outbox.admin.base import ReadOnlyAdmin, choice_filter
from outbox.admin.body_preview import READ_BYTES
from outbox.admin.contents import contents
from outbox.admin.links import about_link, message_link
from outbox.admin.pages import frame
from outbox.admin.text import Text, badge, local, moment, shown, since
from outbox.message import Header, read_headers
from outbox.models import MessageRow, MessageState
from outbox.monitoring.timeline import Severity
from outbox.pipeline.archive import find_archived
from outbox.pipeline.models import ArchivedDay
from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.lake import ArchivedMessage, day_of

Step = ArchivedDay.Step

BADGES: dict[str, tuple[Text, str]] = {
    Step.PLANNED: (_("being written"), "waiting"),
    Step.COMMITTED: (_("in lake and database"), "waiting"),
    Step.CHANGED: (_("to be archived again"), "waiting"),
    Step.DELETED: (_("only in the lake"), "good"),
}


@admin.register(ArchivedDay)
class ArchivedDayAdmin(ReadOnlyAdmin):
    list_display = ["day", "step", "messages", "attempt", "planned", "committed", "deleted"]
    list_display_links = None
    list_filter = [choice_filter("state", list(Step), _("state"))]
    keyset = "day"
    is_small = True
    time = "planned_at"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer("manifest")  # long, since it lists all files of the day

    @admin.display(description=_("state"))
    def step(self, row: ArchivedDay) -> SafeString:
        return badge(*BADGES[row.state])

    @admin.display(description=_("messages"))
    def messages(self, row: ArchivedDay) -> int:
        return row.rows

    @admin.display(description=_("planned"))
    def planned(self, row: ArchivedDay) -> SafeString:
        return moment(row.planned_at)

    @admin.display(description=pgettext_lazy("archived day", "committed"))
    def committed(self, row: ArchivedDay) -> SafeString:
        return moment(row.committed_at)

    @admin.display(description=_("deleted from database"))
    def deleted(self, row: ArchivedDay) -> SafeString:
        return moment(row.deleted_at)


STATES = dict(MessageState.MessageStatus.choices)
TONES = {"sent": Severity.GOOD, "dead": Severity.BAD, "lost": Severity.BAD}


def archived_message(model_admin: ModelAdmin, request: HttpRequest, message_id: UUID) -> TemplateResponse:
    """Show a message from the lake. The status is 404 if the lake does not have it, and 503 if the lake cannot be read."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    details: dict[str, Any] = {}
    status = 200
    try:
        archived = find_archived(router.db_for_read(MessageRow), message_id)
        details = _details(model_admin, request, archived) if archived else {"day": day_of(message_id)}
        status = 200 if archived else 404
    except PipelineError as error:
        details, status = {"error": shown(str(error), 1000)}, 503
    context = {
        **model_admin.admin_site.each_context(request),
        **frame(model_admin.admin_site, request),
        "title": _("Message {}").format(message_id),
        "opts": model_admin.opts,
        "media": model_admin.media,
        **details,
    }
    return TemplateResponse(request, "admin/outbox_pipeline/archived_message.html", context, status=status)


def _details(model_admin: ModelAdmin, request: HttpRequest, archived: ArchivedMessage) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: local(value) if isinstance(value, datetime) else value for name, value in archived.message.items()
    }
    headers = read_headers(row["headers"])
    site = model_admin.admin_site
    cause = headers.get(Header.CAUSATION_ID, "")
    return {
        "row": row,
        "state": badge(STATES.get(row["state"], row["state"]), TONES.get(row["state"], Severity.PLAIN)),
        "topic": shown(row["topic"]),
        "key": shown(row["key"]),
        "last_error": shown(row["last_error"] or "", 2000),
        "about": about_link(site, request, row["about"]) if row["about"] else "",
        "cause": message_link(site, cause, short=False) if cause else "",
        "age": since(row["created_at"]),
        "commit": archived.commit,
        "handled": [
            {"group": shown(row["consumer_group"], 100), "at": local(row["handled_at"]), "delivery_count": row["delivery_count"]}
            for row in archived.handled
        ],
        **contents(request, headers, row["body"][:READ_BYTES], len(row["body"])),
    }

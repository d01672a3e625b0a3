"""Inbox rows: the messages that each group has handled."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox.admin.base import ReadOnlyAdmin, TopicFilter
from outbox.admin.links import message_link
from outbox.admin.lists import Filter
from outbox.admin.text import moment, shown
from outbox.admin.times import Time
from outbox.consuming.delivery_info import uuid_of
from outbox.consuming.register import groups
from outbox.models import InboxRow


class GroupFilter(Filter):
    """Filter by the project's consumer groups."""

    title = _("group")
    parameter_name = "group"
    column = "consumer_group"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in sorted(groups())]


@admin.register(InboxRow)
class InboxAdmin(ReadOnlyAdmin):
    list_display = ["handled", "consumer_group", "message", "topic", "delivery", "lane_and_number", "shown_idempotency_key"]
    list_display_links = None
    list_filter = [GroupFilter, TopicFilter]
    search_fields = ["message_id", "idempotency_key"]
    search_help_text = _("A message id, or an idempotency key of one of the project's groups. Exact matches only.")
    keyset = "handled_at"
    older = "lte"
    time = "handled_at"
    time_is = Time.KEYSET

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return bool(request.user.has_perm("outbox.view_inbox"))

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def search(self, rows: QuerySet[InboxRow], text: str) -> QuerySet[InboxRow]:
        by_key = Q(consumer_group__in=sorted(groups()), idempotency_key=text)
        return rows.filter(Q(message_id=uuid_of(text)) | by_key)

    @admin.display(description=_("handled"))
    def handled(self, row: InboxRow) -> SafeString:
        return moment(row.handled_at)

    @admin.display(description=_("message"))
    def message(self, row: InboxRow) -> SafeString:
        return message_link(self.admin_site, row.message_id)

    @admin.display(description=_("delivery"))
    def delivery(self, row: InboxRow) -> int:
        return row.delivery_count

    @admin.display(description=_("lane, number"))
    def lane_and_number(self, row: InboxRow) -> str:
        return "" if row.number is None else f"{row.lane}, {row.number}"

    @admin.display(description=_("idempotency key"))
    def shown_idempotency_key(self, row: InboxRow) -> SafeString:
        return shown("" if row.idempotency_key == str(row.message_id) else row.idempotency_key, 80)

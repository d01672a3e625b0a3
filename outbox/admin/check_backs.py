"""Check-backs: the brokers' questions about half messages, and the answers."""

from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from outbox.admin.base import ReadOnlyAdmin, TopicFilter, choice_filter
from outbox.admin.links import message_link
from outbox.admin.text import badge, moment, shown
from outbox.admin.times import Time
from outbox.message import Resolution
from outbox.models import CheckBack

ASKED_BY = ["endpoint", "broker", "command", "admin"]
TONES: dict[str, str] = {Resolution.COMMIT: "good", Resolution.UNKNOWN: "waiting"}


@admin.register(CheckBack)
class CheckBackAdmin(ReadOnlyAdmin):
    list_display = ["answered", "shown_answer", "shown_reason", "asked", "message", "topic", "half", "row"]
    list_display_links = None
    list_filter = [choice_filter("answer", [*Resolution]), choice_filter("asked_by", ASKED_BY), TopicFilter]
    time = "answered_at"
    time_is = Time.BESIDE_IDS
    search_fields = ["message_id"]
    search_help_text = "A message id."

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[CheckBack], search_term: str
    ) -> tuple[QuerySet[CheckBack], bool]:
        term = search_term.strip()
        return (queryset.filter(message_id=term) if term else queryset), False

    def answered(self, row: CheckBack) -> SafeString:
        return moment(row.answered_at)

    @admin.display(description="answer")
    def shown_answer(self, row: CheckBack) -> SafeString:
        return badge(row.shown_answer, TONES.get(row.answer, "plain"))

    @admin.display(description="reason")
    def shown_reason(self, row: CheckBack) -> SafeString:
        return shown(row.reason, 200)

    def asked(self, row: CheckBack) -> str:
        return f"{row.asked_by}, ask {row.asked}"

    def message(self, row: CheckBack) -> SafeString:
        return message_link(self.admin_site, row.message_id)

    @admin.display(description="half")
    def half(self, row: CheckBack) -> SafeString:
        return shown(row.half_id, 40)

    @admin.display(description="row")
    def row(self, row: CheckBack) -> str:
        return row.about

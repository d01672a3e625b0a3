"""Check-backs: the brokers' questions about half messages, and the answers."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox.admin.base import ReadOnlyAdmin, TopicFilter, choice_filter
from outbox.admin.links import message_link
from outbox.admin.open_transactions import transaction_cell
from outbox.admin.pages import may_see
from outbox.admin.text import badge, moment, shown
from outbox.admin.times import Time
from outbox.message import Resolution
from outbox.models import CheckBack, MessageRow
from outbox.monitoring.open_transactions import read_open_transactions

ASKED_BY = ["endpoint", "broker", "command", "admin"]
TONES: dict[str, str] = {Resolution.COMMIT: "good", Resolution.UNKNOWN: "waiting"}


@admin.register(CheckBack)
class CheckBackAdmin(ReadOnlyAdmin):
    list_display = ["answered", "shown_answer", "shown_reason", "asked", "message", "topic", "half", "row", "transaction"]
    list_display_links = None
    list_filter = [
        choice_filter("answer", [*Resolution], _("answer")),
        choice_filter("asked_by", ASKED_BY, _("asked by")),
        TopicFilter,
    ]
    time = "answered_at"
    time_is = Time.BESIDE_IDS
    search_fields = ["message_id"]
    search_help_text = _("A message id.")

    def search(self, rows: QuerySet[CheckBack], text: str) -> QuerySet[CheckBack]:
        return rows.filter(message_id=text)

    def complete(self, request: HttpRequest, rows: list[Any]) -> None:
        open_transactions = read_open_transactions(
            (row.message_id, row.token) for row in rows if row.answer == Resolution.UNKNOWN
        )
        with_query = may_see(self.admin_site, MessageRow, request)
        for row in rows:
            sessions = open_transactions.get(row.message_id) if row.answer == Resolution.UNKNOWN else None
            row.transaction = transaction_cell(sessions, with_query=with_query) if sessions else ""  # old transactions have ended

    @admin.display(description=_("answered"))
    def answered(self, row: CheckBack) -> SafeString:
        return moment(row.answered_at)

    @admin.display(description=_("answer"))
    def shown_answer(self, row: CheckBack) -> SafeString:
        return badge(row.shown_answer, TONES.get(row.answer, "plain"))

    @admin.display(description=_("reason"))
    def shown_reason(self, row: CheckBack) -> SafeString:
        return shown(row.reason, 200)

    @admin.display(description=_("asked"))
    def asked(self, row: CheckBack) -> str:
        return _("{}, ask {}").format(row.asked_by, row.asked)

    @admin.display(description=_("message"))
    def message(self, row: CheckBack) -> SafeString:
        return message_link(self.admin_site, row.message_id)

    @admin.display(description=_("half"))
    def half(self, row: CheckBack) -> SafeString:
        return shown(row.half_id, 40)

    @admin.display(description=_("row"))
    def row(self, row: CheckBack) -> str:
        return row.about

    @admin.display(description=_("transaction now"))
    def transaction(self, row: Any) -> SafeString:
        """Return the transaction of a message that went half first, while it is open."""
        cell: SafeString = row.transaction
        return cell

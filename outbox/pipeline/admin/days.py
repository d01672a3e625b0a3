"""The admin of archived days."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from outbox.admin.base import ReadOnlyAdmin, choice_filter
from outbox.admin.text import badge, moment
from outbox.pipeline.models import ArchivedDay

Step = ArchivedDay.Step

BADGES: dict[str, tuple[str, str]] = {
    Step.PLANNED: ("being written", "waiting"),
    Step.COMMITTED: ("in lake and database", "waiting"),
    Step.CHANGED: ("to be archived again", "waiting"),
    Step.DELETED: ("only in the lake", "good"),
}


@admin.register(ArchivedDay)
class ArchivedDayAdmin(ReadOnlyAdmin):
    list_display = ["day", "step", "messages", "attempt", "planned", "committed", "deleted"]
    list_display_links = None
    list_filter = [choice_filter("state", list(Step.values))]
    keyset = "day"
    is_small = True
    time = "planned_at"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer("manifest")  # it is long: it lists every file of the day

    @admin.display(description="state")
    def step(self, row: ArchivedDay) -> SafeString:
        return badge(*BADGES[row.state])

    def messages(self, row: ArchivedDay) -> int:
        return row.rows

    def planned(self, row: ArchivedDay) -> SafeString:
        return moment(row.planned_at)

    def committed(self, row: ArchivedDay) -> SafeString:
        return moment(row.committed_at)

    @admin.display(description="deleted from database")
    def deleted(self, row: ArchivedDay) -> SafeString:
        return moment(row.deleted_at)

"""What the monitor saw: how the outbox and each group stand with each lane."""

from __future__ import annotations

from django.contrib import admin
from django.utils.safestring import SafeString

from outbox.admin.base import ReadOnlyAdmin, TopicFilter
from outbox.admin.text import badge, moment, shown
from outbox.pipeline.models import MonitorLane


@admin.register(MonitorLane)
class MonitorAdmin(ReadOnlyAdmin):
    list_display = [
        "topic",
        "group",
        "shown_lane",
        "seen",
        "shown_missing",
        "since",
        "repeats",
        "failed",
        "highest",
        "updated",
    ]
    list_display_links = None
    list_filter = [TopicFilter]
    is_small = True

    def group(self, row: MonitorLane) -> SafeString:
        return shown(row.consumer_group, 80) if row.consumer_group else shown("(outbox)", 80)

    @admin.display(description="lane")
    def shown_lane(self, row: MonitorLane) -> str:
        return "" if row.lane < 0 else str(row.lane)

    @admin.display(description="missing")
    def shown_missing(self, row: MonitorLane) -> SafeString:
        if row.missing is None:
            return shown("not judged", 20)
        return badge(f"{row.missing}, first {row.first_missing}", "waiting") if row.missing else badge("none", "good")

    @admin.display(description="first missing since")
    def since(self, row: MonitorLane) -> SafeString | str:
        return moment(row.first_missing_since) if row.first_missing_since else ""

    @admin.display(description="repeated")
    def repeats(self, row: MonitorLane) -> int:
        return row.duplicates

    def updated(self, row: MonitorLane) -> SafeString:
        return moment(row.updated_at)

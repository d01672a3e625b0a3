"""The admin of audits: the list, and the page of one, with its charts of latency and backlog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import Http404, HttpRequest, HttpResponse
from django.template.defaultfilters import pluralize
from django.urls import URLPattern, path
from django.utils.safestring import SafeString

from outbox import database
from outbox.admin.base import ReadOnlyAdmin, choice_filter
from outbox.admin.lines import Line, drawing
from outbox.admin.links import message_link
from outbox.admin.pages import may_see, url_of
from outbox.admin.text import badge, moment, shown
from outbox.monitoring.text import age
from outbox.pipeline.admin.findings import state_badge
from outbox.pipeline.audit_runs import store, verdict
from outbox.pipeline.audit_runs.figures import (
    OF_GROUPS,
    LatencySeries,
    Percentiles,
    by_group,
    given_up,
    latency_series,
    percentiles,
)
from outbox.pipeline.models import AuditBacklog, AuditFinding, AuditRun
from outbox.pipeline.spark.bins import SHARES

DRAWN = 6  # charts of each
POINTS = 96  # of a chart
SHARES_DRAWN = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class DrawnBacklog:
    """The backlog of a group and topic. `minutes`: seconds since 1970 and backlog, first to last."""

    group: str
    topic: str
    backlog: int
    growth: float
    cause: str
    onset: datetime | None
    most_repeated: Sequence[Sequence[Any]]
    minutes: Sequence[Sequence[float]]


def latency_and_backlog(
    site: AdminSite,
    *,
    backlogs: Sequence[DrawnBacklog],
    latencies: Sequence[Percentiles],
    latency_series: Sequence[LatencySeries],
) -> dict[str, Any]:
    """Return the context of the template `_latency_and_backlog.html`."""
    worst = sorted(backlogs, key=lambda one: (-one.backlog, one.group, one.topic))
    return {
        "backlogs": [
            {"group": one.group, "topic": one.topic, "backlog": one.backlog, "growth": one.growth, "cause": one.cause}
            | {
                "onset": one.onset,
                "again": [(message_link(site, message), failures) for message, failures in one.most_repeated[:3]],
            }
            for one in worst
        ],
        "backlog_drawings": [_backlog(nth, backlog) for nth, backlog in enumerate(worst[:DRAWN]) if backlog.minutes],
        "shares": [f"p{share * 100:g}" for share in SHARES],
        "latencies": [
            {"topic": latency.hop[0], "hop": latency.hop[1], "group": latency.hop[2], "count": latency.count}
            | {"texts": ["" if seconds is None else format_seconds(seconds) for seconds in latency.seconds.values()]}
            for latency in latencies
        ],
        "latency_drawings": [_latency(nth, series) for nth, series in enumerate(latency_series)],
        "hidden_hops": max(0, len(latencies) - len(latency_series)),
    }


def format_seconds(seconds: float) -> str:
    """Return a latency as text: 40 µs, 3.2 ms, 1.5 s, 12 min, 3 h."""
    for limit, size, unit in ((0.001, 1e-6, "µs"), (1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def _backlog(nth: int, one: DrawnBacklog) -> dict[str, Any]:
    step = -(-len(one.minutes) // POINTS)
    points = list(one.minutes[::-1][::step][::-1])  # the last one always
    text = f"Backlog: {one.backlog:,}."
    if one.onset:
        text = f"Backlog: {one.backlog:,}, growing by {one.growth:,.1f} per minute: {one.cause}."
    return drawing(
        f"outbox-backlog-{nth}",
        f"Backlog of {one.group}, {one.topic}",
        text,
        [Line("waiting messages", [value for _, value in points])],
        begins_at=datetime.fromtimestamp(points[0][0], UTC),
        ends_at=datetime.fromtimestamp(points[-1][0], UTC),
        say=lambda value: f"{value:,.0f}",
    )


def _latency(nth: int, one: LatencySeries) -> dict[str, Any]:
    topic, hop, group = one.hop
    of_group = f", group {group}" if group else ""
    return drawing(
        f"outbox-latency-{nth}",
        f"Latency of {topic}: {hop}{of_group}",
        "Logarithmic scale; gaps where there was no message.",
        [Line(f"p{share * 100:g}", one.seconds[share]) for share in SHARES_DRAWN],
        begins_at=one.begins_at,
        ends_at=one.ends_at,
        say=format_seconds,
        by_decades=True,
    )


TONES: dict[str, str] = {
    AuditRun.RunState.RUNNING: "waiting",
    AuditRun.RunState.DONE: "plain",
    AuditRun.RunState.FAILED: "bad",
    AuditRun.RunState.DIED: "bad",
    AuditRun.RunState.SKIPPED: "waiting",
}
HEADS = ("assigned", "sent", "explained", "broker", "in flight")
FINDINGS_SHOWN = 50


@admin.register(AuditRun)
class AuditRunAdmin(ReadOnlyAdmin):
    list_display = ["number", "state_now", "answer", "started", "took", "signed"]
    list_filter = [choice_filter("state", list(AuditRun.RunState.values))]
    is_small = True
    time = "started_at"
    pages = ("changelist", "change")
    fields = ()

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("<int:run_id>/verdict.json", wrap(self.verdict_view), name="outbox_pipeline_auditrun_verdict"),
            *super().get_urls(),
        ]

    @admin.display(description="audit")
    def number(self, row: AuditRun) -> str:
        return f"audit {row.pk}"

    @admin.display(description="state")
    def state_now(self, row: AuditRun) -> SafeString:
        state = store.state_of(row)
        return badge(state, TONES[state])

    def answer(self, row: AuditRun) -> SafeString:
        if row.found is None:
            return shown(store.error_of(row).partition("\n")[0], 200)
        if row.found:
            return badge(f"{row.found} finding{pluralize(row.found)}", "bad")
        return (
            badge("nothing is lost, some are dead letters", "waiting") if given_up(row.counts) else badge("no findings", "good")
        )

    def started(self, row: AuditRun) -> SafeString:
        return moment(row.started_at)

    def took(self, row: AuditRun) -> str:
        return age((row.ended_at - row.started_at).total_seconds()) if row.ended_at else ""

    @admin.display(boolean=True)
    def signed(self, row: AuditRun) -> bool | None:
        return bool(row.signature) if row.verdict else None

    def verdict_view(self, request: HttpRequest, run_id: int) -> HttpResponse:
        """Return the verdict as a file for `outbox_audit --verify`."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        run = AuditRun.objects.filter(pk=run_id).exclude(verdict="").first()
        if run is None:
            raise Http404
        named = {"Content-Disposition": f'attachment; filename="audit-{run.pk}-verdict.json"'}
        return HttpResponse(verdict.as_file(run.verdict, run.signature), content_type="application/json", headers=named)

    def get_extra_context(self, request: HttpRequest, run: AuditRun) -> dict[str, Any]:
        return {
            "title": f"Audit {run.pk}",
            "state": self.state_now(run),
            "answer": self.answer(run) if run.found is not None else "",
            "error": shown(store.error_of(run)),
            "verdict_url": url_of(self.admin_site, "outbox_pipeline_auditrun_verdict", run.pk) if run.verdict else "",
            "heads": HEADS,
            "topics": [_topic(name, counts) for name, counts in sorted(run.counts.items())],
            "given_up": given_up(run.counts),
            "group_heads": [*OF_GROUPS],
            "groups": [
                (group, name, [*of_group.values()])
                for name, counts in sorted(run.counts.items())
                for group, of_group in sorted(by_group(counts).items())
            ],
            **self._findings(request, run),
            **_latency_and_backlog(self, run),
        }

    def _findings(self, request: HttpRequest, run: AuditRun) -> dict[str, Any]:
        """Return the first findings, and a link to all of them for users who may see it."""
        site = self.admin_site
        may = may_see(site, AuditFinding, request)
        rows = AuditFinding.objects.filter(run=run).order_by("id")[:FINDINGS_SHOWN]
        found = [
            {"text": shown(row.text, 300), "count": row.count, "state": state_badge(row)}
            | {"url": url_of(site, "outbox_pipeline_auditfinding_change", row.pk) if may else ""}
            for row in rows
        ]
        url = f"{url_of(site, 'outbox_pipeline_auditfinding_changelist')}?run={run.pk}" if may and found else ""
        return {"findings": found, "more": max(0, (run.found or 0) - len(found)), "findings_url": url}


def _topic(name: str, counts: dict[str, int]) -> tuple[str, list[int]]:
    return name, [counts.get(head, 0) for head in HEADS]


def _latency_and_backlog(model_admin: AuditRunAdmin, run: AuditRun) -> dict[str, Any]:
    connection = database.raw(router.db_for_read(AuditRun))
    latencies = percentiles(connection, run.pk)
    rows = AuditBacklog.objects.filter(run=run)
    backlogs = [
        DrawnBacklog(
            *(row.consumer_group, row.topic, row.backlog, row.growth, row.cause),
            onset=row.onset_at,
            most_repeated=row.most_repeated,
            minutes=row.minutes,
        )
        for row in rows
    ]
    drawn = latency_series(connection, run.pk, [latency.hop for latency in latencies[:DRAWN]], shares=SHARES_DRAWN)
    return latency_and_backlog(model_admin.admin_site, backlogs=backlogs, latencies=latencies, latency_series=drawn)

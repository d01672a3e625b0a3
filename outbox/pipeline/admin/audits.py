"""The admin of audits: the list, and the page of one, with its charts of latency and backlog."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Sum
from django.http import Http404, HttpRequest, HttpResponse
from django.template.defaultfilters import pluralize
from django.template.loader import render_to_string
from django.urls import URLPattern, path
from django.utils.safestring import SafeString, mark_safe

from outbox import database
from outbox.admin.base import ReadOnlyAdmin, choice_filter
from outbox.admin.lines import Line, drawing
from outbox.admin.links import message_link
from outbox.admin.pages import may_see, url_of
from outbox.admin.text import badge, moment, shown
from outbox.monitoring.text import age
from outbox.pipeline import runs, verdict
from outbox.pipeline.admin.findings import state_badge
from outbox.pipeline.figures import OF_GROUPS, LatencySeries, by_group, given_up, latency_series, losses, percentiles
from outbox.pipeline.models import AuditBacklog, AuditFinding, AuditRun
from outbox.pipeline.spark.bins import SHARES
from outbox.pipeline.spark.findings import FindingKind, Stage

DRAWN = 6  # charts of each
POINTS = 96  # of a chart
SHARES_DRAWN = (0.5, 0.95, 0.99)


def format_seconds(seconds: float) -> str:
    """Return a latency as text: 40 µs, 3.2 ms, 1.5 s, 12 min, 3 h."""
    for limit, size, unit in ((0.001, 1e-6, "µs"), (1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def _backlog(nth: int, row: AuditBacklog) -> dict[str, Any]:
    step = -(-len(row.minutes) // POINTS)
    points = list(row.minutes[::-1][::step][::-1])  # the last one always
    text = f"Backlog: {row.backlog:,}."
    if row.onset_at:
        text = f"Backlog: {row.backlog:,}, growing by {row.growth:,.1f} per minute: {row.cause}."
    return drawing(
        f"outbox-backlog-{nth}",
        f"Backlog of {row.consumer_group}, {row.topic}",
        text,
        [Line("waiting messages", [value for _, value in points])],
        begins_at=datetime.fromtimestamp(points[0][0], UTC),
        ends_at=datetime.fromtimestamp(points[-1][0], UTC),
        say=lambda value: f"{value:,.0f}",
    )


def _latency(nth: int, series: LatencySeries) -> dict[str, Any]:
    topic, hop, group = series.hop
    of_group = f", group {group}" if group else ""
    return drawing(
        f"outbox-latency-{nth}",
        f"Latency of {topic}: {hop}{of_group}",
        "Logarithmic scale; gaps where there was no message.",
        [Line(f"p{share * 100:g}", series.seconds[share]) for share in SHARES_DRAWN],
        begins_at=series.begins_at,
        ends_at=series.ends_at,
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
FINDINGS_SHOWN, FINDINGS_IN_REPORT = 50, 1_000
SHEETS = ("static/outbox/admin.css", "pipeline/static/outbox_pipeline/report.css")


@admin.display(description="state")
def state_now(run: AuditRun) -> SafeString:
    """Return the state of a run as a badge."""
    state = runs.state_of(run)
    return badge(state, TONES[state])


def answer(run: AuditRun) -> SafeString:
    """Return the result of a run: how much it found, or why it failed."""
    if run.found is None:
        return shown(runs.error_of(run).partition("\n")[0], 200)
    if run.found:
        return badge(f"{run.found} finding{pluralize(run.found)}", "bad")
    return badge("nothing is lost, some are dead letters", "waiting") if given_up(run.counts) else badge("no findings", "good")


@admin.register(AuditRun)
class AuditRunAdmin(ReadOnlyAdmin):
    list_display = ["number", state_now, answer, "started", "took", "signed"]
    list_filter = [choice_filter("state", list(AuditRun.RunState.values))]
    is_small = True
    time = "started_at"
    pages = ("changelist", "change")
    fields = ()

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("<int:run_id>/verdict.json", wrap(self.verdict_view), name="outbox_pipeline_auditrun_verdict"),
            path("<int:run_id>/report.html", wrap(self.report_view), name="outbox_pipeline_auditrun_report"),
            *super().get_urls(),
        ]

    @admin.display(description="audit")
    def number(self, row: AuditRun) -> str:
        return f"audit {row.pk}"

    def started(self, row: AuditRun) -> SafeString:
        return moment(row.started_at)

    def took(self, row: AuditRun) -> str:
        return age((row.ended_at - row.started_at).total_seconds()) if row.ended_at else ""

    @admin.display(boolean=True)
    def signed(self, row: AuditRun) -> bool | None:
        return bool(row.signature) if row.verdict else None

    def verdict_view(self, request: HttpRequest, run_id: int) -> HttpResponse:
        """Return the verdict as a file for `outbox_audit --verify`."""
        run = self._finished(request, run_id)
        named = {"Content-Disposition": f'attachment; filename="audit-{run.pk}-verdict.json"'}
        return HttpResponse(verdict.as_file(run.verdict, run.signature), content_type="application/json", headers=named)

    def report_view(self, request: HttpRequest, run_id: int) -> HttpResponse:
        """Return the report as a file, whose links lead to this admin."""
        run = self._finished(request, run_id)
        may_open = may_see(self.admin_site, AuditFinding, request)
        named = {"Content-Disposition": f'attachment; filename="audit-{run.pk}.html"'}
        page = report_html(run, self.admin_site, base=request.build_absolute_uri("/"), may_open=may_open)
        return HttpResponse(page, headers=named)

    def _finished(self, request: HttpRequest, run_id: int) -> AuditRun:
        if not self.has_view_permission(request):
            raise PermissionDenied
        run = AuditRun.objects.filter(pk=run_id).exclude(verdict="").first()
        if run is None:
            raise Http404
        return run

    def get_extra_context(self, request: HttpRequest, run: AuditRun) -> dict[str, Any]:
        site = self.admin_site
        urls = {
            f"{name}_url": url_of(site, f"outbox_pipeline_auditrun_{name}", run.pk) if run.verdict else ""
            for name in ("verdict", "report")
        }
        return {**_context(run, site, may_open=may_see(site, AuditFinding, request), limit=FINDINGS_SHOWN), **urls}


def report_html(run: AuditRun, site: AdminSite, *, base: str = "", may_open: bool = True) -> str:
    """
    Return the report of a run as one page that loads nothing.

    Args:
        base: the address of the server with the admin, for links; empty: the page has none.
        may_open: the reader may see findings in the admin.
    """
    style = "".join((Path(str(files("outbox"))) / sheet).read_text() for sheet in SHEETS)
    context = _context(run, site if base else None, may_open=may_open, limit=FINDINGS_IN_REPORT)
    return render_to_string(
        "admin/outbox_pipeline/report.html",
        {**context, "original": run, "base": base, "style": mark_safe(style)},  # noqa: S308  (a file of this package)
    )


def _context(run: AuditRun, site: AdminSite | None, *, may_open: bool, limit: int) -> dict[str, Any]:
    """Return the context of `_run.html`. Without a site it has no links."""
    connection = database.raw(router.db_for_read(AuditRun))
    latencies = percentiles(connection, run.pk)
    series = latency_series(connection, run.pk, [latency.hop for latency in latencies[:DRAWN]], shares=SHARES_DRAWN)
    backlogs = list(AuditBacklog.objects.filter(run=run).order_by("-backlog", "consumer_group", "topic"))
    findings = AuditFinding.objects.filter(run=run).order_by("id")[:limit]
    url = partial(url_of, site) if site and may_open else lambda *_: ""
    listed = url("outbox_pipeline_auditfinding_changelist")
    return {
        "title": f"Audit {run.pk}",
        "state": state_now(run),
        "answer": answer(run) if run.found is not None else "",
        "error": shown(runs.error_of(run)),
        "stages": _stages(run),
        "losses": _losses(connection, run),
        "findings": [
            {"text": shown(row.text, 300), "count": row.count, "state": state_badge(row)}
            | {"url": url("outbox_pipeline_auditfinding_change", row.pk)}
            for row in findings
        ],
        "more": max(0, (run.found or 0) - limit),
        "findings_url": f"{listed}?run={run.pk}" if listed and run.found else "",
        "heads": HEADS,
        "topics": [(name, [counts.get(head, 0) for head in HEADS]) for name, counts in sorted(run.counts.items())],
        "given_up": given_up(run.counts),
        "group_heads": [*OF_GROUPS],
        "groups": [
            (group, name, [*of_group.values()])
            for name, counts in sorted(run.counts.items())
            for group, of_group in sorted(by_group(counts).items())
        ],
        "backlogs": [
            (row, [(message_link(site, message) if site else message, failures) for message, failures in row.most_repeated[:3]])
            for row in backlogs
        ],
        "backlog_drawings": [_backlog(nth, row) for nth, row in enumerate(backlogs[:DRAWN]) if row.minutes],
        "shares": [f"p{share * 100:g}" for share in SHARES],
        "latencies": [
            (latency.hop, latency.count, ["" if known is None else format_seconds(known) for known in latency.seconds.values()])
            for latency in latencies
        ],
        "latency_drawings": [_latency(nth, hop) for nth, hop in enumerate(series)],
        "hidden_hops": max(0, len(latencies) - len(series)),
    }


def _stages(run: AuditRun) -> list[dict[str, Any]]:
    """Return the four stages: how many messages each has, and how many are lost there."""
    sums: Counter[str] = Counter()
    for counts in run.counts.values():
        sums.update(counts)
        for of_group in by_group(counts).values():
            sums.update(of_group)
    lost: Counter[str] = Counter()
    found = AuditFinding.objects.filter(run=run, kind=FindingKind.LOST).values_list("subject", "stage")
    for subject, stage, many in found.annotate(Sum("count")).order_by():
        lost[Stage.BUSINESS if subject else stage] += many
    stages = {
        Stage.BUSINESS: (lost[Stage.BUSINESS], "rows without a message"),
        Stage.OUTBOX: (sums["assigned"], f"numbered; sent: {sums['sent']:,}, dead or discarded: {sums['explained']:,}"),
        Stage.BROKER: (sums["broker"], "stored"),
        Stage.INBOX: (sums["handled"], f"handled; unread: {sums['unread']:,}, dead: {sums['dead letters']:,}"),
    }
    return [
        {"name": stage.capitalize(), "number": f"{number:,}", "tone": "bad" if lost[stage] else "good"}
        | {"text": f"{text}; lost here: {lost[stage]:,}" if stage is not Stage.BUSINESS else text}
        for stage, (number, text) in stages.items()
    ]


def _losses(connection: database.Connection, run: AuditRun) -> dict[str, Any]:
    """Return the drawing of lost messages by the time of their publishing; empty if none is named."""
    begins_at, ends_at, counts = losses(connection, run.pk)
    if not begins_at or not ends_at:
        return {}
    return drawing(
        "outbox-losses",
        "Lost messages",
        f"By the time of publishing, as far as ids are known: {sum(counts):,}.",
        [Line("lost", counts)],
        begins_at=begins_at,
        ends_at=ends_at,
        say=lambda value: f"{value:,.0f}",
    )

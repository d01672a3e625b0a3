"""The admin of audits (a list, a page of each, its report as a file) and of findings, which can be repaired or acknowledged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import router
from django.db.models import QuerySet, Sum
from django.http import Http404, HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext, pgettext_lazy

from outbox import database
from outbox.admin.base import ReadOnlyAdmin, TopicFilter, choice_filter
from outbox.admin.impact import BulkAct, as_of, chosen_rows, impact_page, notify, reason_form, write_log
from outbox.admin.lines import drawing
from outbox.admin.links import about_link, message_link
from outbox.admin.lists import Filter
from outbox.admin.pages import may_see, url_of
from outbox.admin.text import Text, badge, moment, number, shown
from outbox.database import guarded
from outbox.monitoring.text import age
from outbox.pipeline import repair, runs, verdict
from outbox.pipeline.figures import OF_GROUPS, Series, by_group, given_up, latency_series, losses, percentiles
from outbox.pipeline.models import AuditBacklog, AuditFinding, AuditRun
from outbox.pipeline.spark.findings import FindingKind, Stage
from outbox.pipeline.spark.measures import SHARES

MAX_FINDINGS = 200  # on which an action acts at a time
RUNS_OFFERED = 20
LINKS_SHOWN = 100

RESEND = BulkAct(
    "resend",
    _("Send lost messages again"),
    _("Send again"),
    _("Messages to send again"),
    _(
        "Relays send them again under their old numbers; groups that have handled them drop them. Messages that only one group "
        "lost are delivered to that group alone, if the broker deduplicates sends."
    ),
)
ACKNOWLEDGE = BulkAct(
    "acknowledge",
    _("Acknowledge findings"),
    _("Acknowledge"),
    _("Acknowledged"),
    _("They are closed. No message is sent."),
)


class RunFilter(Filter):
    """Filter findings by audit."""

    title = _("audit")
    parameter_name = "run"
    is_indexed = True

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        newest = AuditRun.objects.filter(found__gt=0).order_by("-id").values_list("id", flat=True)[:RUNS_OFFERED]
        return [(str(run), _("audit {}").format(run)) for run in newest]

    def has_output(self) -> bool:
        return True

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = str(self.value() or "")
        if not value:
            return queryset
        return queryset.filter(run=int(value)) if value.isdecimal() and len(value) < 19 else queryset.none()


class FindingStateFilter(Filter):
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Text]]:
        return [("open", _("open")), ("sent", _("sent again")), ("acknowledged", _("acknowledged"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.value():
            case None:
                return queryset
            case "open":
                return queryset.filter(resent_at=None, acknowledged_at=None)
            case "sent":
                return queryset.exclude(resent_at=None)
            case "acknowledged":
                return queryset.filter(resent_at=None).exclude(acknowledged_at=None)
        return queryset.none()


def state_badge(row: AuditFinding) -> SafeString:
    """Return a badge that says whether a finding is open, acknowledged or sent again."""
    if row.resent_at:
        return badge(_("{} sent again").format(row.resent_count), "good")
    return badge(_("acknowledged"), "plain") if row.acknowledged_at else badge(_("open"), "bad")


@admin.register(AuditFinding)
class AuditFindingAdmin(ReadOnlyAdmin):
    list_display = ["shown_text", "audit", "state", "count", "names"]
    list_filter = [
        FindingStateFilter,
        RunFilter,
        choice_filter("kind", list(FindingKind), _("kind")),
        choice_filter("stage", list(Stage), _("stage")),
        TopicFilter,
    ]
    list_select_related = ["run"]
    time = "run__started_at"
    actions = ["resend", "acknowledge"]
    fields = ()
    pages = ("changelist", "change", "history")

    def has_resend_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "resend")

    def has_acknowledge_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "acknowledge")

    @admin.display(description=_("finding"))
    def shown_text(self, row: AuditFinding) -> SafeString:
        return shown(row.text, 300)

    @admin.display(description=_("audit"))
    def audit(self, row: AuditFinding) -> str:
        return str(row.run_id)

    @admin.display(description=_("state"))
    def state(self, row: AuditFinding) -> SafeString:
        return state_badge(row)

    @admin.display(description="")
    def names(self, row: AuditFinding) -> SafeString:
        links = [message_link(self.admin_site, message_id) for message_id in row.message_ids[:2]]
        return format_html("{} {}", links[0], links[1]) if len(links) == 2 else links[0] if links else SafeString("")

    @admin.action(description=_("Send lost messages again"), permissions=["resend"])
    def resend(self, request: HttpRequest, queryset: QuerySet[AuditFinding]) -> HttpResponse | None:
        """Ask for a confirmation and a reason, then send the messages again, with one transaction and log entry per finding."""
        using, at = router.db_for_write(AuditFinding), as_of(request, queryset.db)
        chosen = queryset.filter(run__ended_at__lte=at).select_related("run").order_by("id")
        plans = [repair.plan(finding, using) for finding in chosen[:MAX_FINDINGS]]
        counts, refused = repair.counts(plans), repair.refusals(plans)
        form = reason_form(request, count=sum(counts.values()), at=at)
        if form.count and not form.is_valid():
            notes = [_("Not sent: {}. {}").format(count, reason) for reason, count in refused.items()]
            return impact_page(
                self, request, act=RESEND, form=form, counts=counts, hidden=chosen_rows(request), limit=form.count, notes=notes
            )
        sent_count = self._send(request, plans, using, form.cleaned_data["reason"]) if form.count else 0
        for reason, count in refused.items():
            self.message_user(request, _("Not sent: {}. {}").format(count, reason), messages.WARNING)
        if sent_count or form.wanted:
            notify(self, request, RESEND, done=sent_count, wanted=form.wanted, limit=form.count)
        return None

    def _send(self, request: HttpRequest, plans: Sequence[repair.ResendPlan], using: str, reason: str) -> int:
        sent_count = 0
        for plan in plans:
            with guarded.atomic(using):
                sent = repair.send(plan.finding.pk, using, by=request.user.get_username())
                if sent.ids:
                    text = _("{} sent again. Reason: {}").format(len(sent.ids), reason)
                    write_log(request, AuditFinding, {str(plan.finding.pk): plan.finding.text}, text)
            sent_count += len(sent.ids)
        return sent_count

    @admin.action(description=_("Acknowledge with note"), permissions=["acknowledge"])
    def acknowledge(self, request: HttpRequest, queryset: QuerySet[AuditFinding]) -> HttpResponse | None:
        """Ask for a note, then close the open findings."""
        at = as_of(request, queryset.db)
        chosen = list(queryset.filter(acknowledged_at=None, run__ended_at__lte=at).order_by("id")[:MAX_FINDINGS])
        counts = Counter(finding.topic for finding in chosen)
        form = reason_form(request, count=len(chosen), at=at)
        if chosen and not form.is_valid():
            return impact_page(
                self, request, act=ACKNOWLEDGE, form=form, counts=counts, hidden=chosen_rows(request), limit=MAX_FINDINGS
            )
        closed_count = self._close(request, chosen, form.cleaned_data["reason"]) if chosen else 0
        notify(self, request, ACKNOWLEDGE, done=closed_count, wanted=form.wanted, limit=MAX_FINDINGS)
        return None

    def _close(self, request: HttpRequest, chosen: list[AuditFinding], note: str) -> int:
        using = router.db_for_write(AuditFinding)
        values = {"acknowledged_at": timezone.now(), "acknowledged_by": request.user.get_username(), "note": note}
        with guarded.atomic(using):
            rows = AuditFinding.objects.using(using).filter(pk__in=[finding.pk for finding in chosen], acknowledged_at=None)
            closed = {str(finding.pk): finding.text for finding in rows.select_for_update()}
            rows.update(**values)
            write_log(request, AuditFinding, closed, _("Acknowledged. Note: {}").format(note))
        return len(closed)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> AuditFinding | None:
        try:
            return AuditFinding.objects.select_related("run").get(pk=int(object_id))
        except (AuditFinding.DoesNotExist, ValueError, ValidationError, OverflowError):
            return None

    def get_extra_context(self, request: HttpRequest, row: AuditFinding) -> dict[str, Any]:
        site = self.admin_site
        may_see_run = may_see(site, AuditRun, request)
        planned = repair.plan(row, router.db_for_read(AuditFinding)) if row.kind == FindingKind.LOST else None
        return {
            "title": _("Finding {} of {}").format(row.pk, row.run),
            "kind": row.kind,
            "state": state_badge(row),
            "text": shown(row.text),
            "note": shown(row.note),
            "run_url": url_of(site, "outbox_pipeline_auditrun_change", row.run_id) if may_see_run else "",
            "messages_found": [message_link(site, message_id) for message_id in row.message_ids[:LINKS_SHOWN]],
            "unnamed": max(0, row.count - min(len(row.message_ids), LINKS_SHOWN)),
            "abouts": [about_link(site, request, about) for about in row.about[:LINKS_SHOWN]],
            "can": len(planned.ids) if planned else 0,
            "cannot": list(planned.refused.items()) if planned else [],
        }


CHARTS_SHOWN = 6  # charts of backlogs, and as many of latencies
POINTS_PER_CHART = 96


def format_seconds(seconds: float) -> str:
    """Return a latency as text: 40 µs, 3.2 ms, 1.5 s, 12 min, 3 h."""
    for limit, size, unit in ((0.001, 1e-6, "µs"), (1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def _backlog(nth: int, row: AuditBacklog) -> dict[str, Any]:
    step = -(-len(row.minutes) // POINTS_PER_CHART)
    points = list(row.minutes[::-1][::step][::-1])  # always with the newest point
    text = _("Backlog: {}.").format(number(row.backlog))
    if row.onset_at:
        text = _("Backlog: {}, growing by {} per minute: {}.").format(number(row.backlog), number(row.growth, 1), row.cause)
    return drawing(
        f"outbox-backlog-{nth}",
        _("Backlog of {}, {}").format(row.consumer_group, row.topic),
        text,
        {_("waiting messages"): [point[1] for point in points]},
        begins_at=datetime.fromtimestamp(points[0][0], UTC),
        ends_at=datetime.fromtimestamp(points[-1][0], UTC),
        say=number,
    )


def _latency(nth: int, begin: datetime, end: datetime, series: Series) -> dict[str, Any]:
    hop, seconds = series
    title = _("Latency of {}: {}, group {}") if hop[2] else _("Latency of {}: {}")
    return drawing(
        f"outbox-latency-{nth}",
        title.format(*hop),
        _("Logarithmic scale; gaps where there was no message."),
        {f"p{share * 100:g}": values for share, values in seconds.items()},
        begins_at=begin,
        ends_at=end,
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
HEADS = {
    "assigned": _("assigned"),
    "sent": _("sent"),
    "explained": _("explained"),
    "broker": _("broker"),
    "in flight": _("in flight"),
}
GROUP_HEADS = {
    "handled": _("handled"),
    "dead letters": _("dead letters"),
    "discarded": _("discarded"),
    "unread": _("unread"),
}
FINDINGS_SHOWN, FINDINGS_IN_REPORT = 50, 1_000
STYLE_SHEETS = ("static/outbox/admin.css", "pipeline/static/outbox_pipeline/report.css")


@admin.display(description=_("state"))
def state_now(run: AuditRun) -> SafeString:
    """Return the state of a run as a badge."""
    state = runs.state_of(run)
    return badge(AuditRun.RunState(state).label, TONES[state])


@admin.display(description=pgettext_lazy("audit", "answer"))
def answer(run: AuditRun) -> SafeString:
    """Return the result of a run: the number of its findings, or the reason why it failed."""
    if run.found is None:
        return shown(runs.error_of(run).partition("\n")[0], 200)
    if run.found:
        return badge(ngettext("{} finding", "{} findings", run.found).format(run.found), "bad")
    if given_up(run.counts):
        return badge(_("nothing is lost, some are dead letters"), "waiting")
    return badge(_("no findings"), "good")


@admin.register(AuditRun)
class AuditRunAdmin(ReadOnlyAdmin):
    list_display = ["number", state_now, answer, "started", "took", "signed"]
    list_filter = [choice_filter("state", list(AuditRun.RunState), _("state"))]
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

    @admin.display(description=_("audit"))
    def number(self, row: AuditRun) -> str:
        return str(row)

    @admin.display(description=_("started"))
    def started(self, row: AuditRun) -> SafeString:
        return moment(row.started_at)

    @admin.display(description=_("took"))
    def took(self, row: AuditRun) -> str:
        return age((row.ended_at - row.started_at).total_seconds()) if row.ended_at else ""

    @admin.display(boolean=True, description=_("signed"))
    def signed(self, row: AuditRun) -> bool | None:
        return bool(row.signature) if row.verdict else None

    def verdict_view(self, request: HttpRequest, run_id: int) -> HttpResponse:
        """Return the verdict as a file for `outbox_audit --verify`."""
        run = self._finished(request, run_id)
        headers = {"Content-Disposition": f'attachment; filename="audit-{run.pk}-verdict.json"'}
        return HttpResponse(verdict.as_file(run.verdict, run.signature), content_type="application/json", headers=headers)

    def report_view(self, request: HttpRequest, run_id: int) -> HttpResponse:
        """Return the report as a file; its links lead to this admin."""
        run = self._finished(request, run_id)
        may_open = may_see(self.admin_site, AuditFinding, request)
        headers = {"Content-Disposition": f'attachment; filename="audit-{run.pk}.html"'}
        page = report_html(run, self.admin_site, base=request.build_absolute_uri("/"), may_open=may_open)
        return HttpResponse(page, headers=headers)

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


def report_html(run: AuditRun, site: AdminSite = admin.site, *, base: str = "", may_open: bool = True) -> str:
    """
    Return the report of a run as one HTML page, which loads no other files.

    Args:
        base: the URL of the server with the admin, for links; empty: the page has no links.
        may_open: whether the reader may see findings in the admin.
    """
    style = "".join((Path(str(files("outbox"))) / sheet).read_text() for sheet in STYLE_SHEETS)
    context = _context(run, site if base else None, may_open=may_open, limit=FINDINGS_IN_REPORT)
    return render_to_string(
        "admin/outbox_pipeline/report.html",
        {**context, "original": run, "base": base, "style": mark_safe(style)},  # noqa: S308  (a file of this package)
    )


def _context(run: AuditRun, site: AdminSite | None, *, may_open: bool, limit: int) -> dict[str, Any]:
    """Return the context of `_run.html`; without a site, the page has no links."""

    def url(view: str, *args: object) -> str:
        return url_of(site, view, *args) if site and may_open else ""

    connection = database.raw(router.db_for_read(AuditRun))
    latencies = percentiles(connection, run.pk)
    begin, end, series = latency_series(connection, run.pk, [hop for hop, _, _ in latencies[:CHARTS_SHOWN]])
    backlogs = list(AuditBacklog.objects.filter(run=run).order_by("-backlog", "consumer_group", "topic"))
    findings = AuditFinding.objects.filter(run=run).order_by("id")[:limit]
    findings_url = url("outbox_pipeline_auditfinding_changelist")
    return {
        "title": _("Audit {}").format(run.pk),
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
        "findings_url": f"{findings_url}?run={run.pk}" if findings_url and run.found else "",
        "heads": HEADS.values(),
        "topics": [(name, [counts.get(head, 0) for head in HEADS]) for name, counts in sorted(run.counts.items())],
        "given_up": given_up(run.counts),
        "group_heads": [GROUP_HEADS[head] for head in OF_GROUPS],
        "groups": [
            (group, name, [*of_group.values()])
            for name, counts in sorted(run.counts.items())
            for group, of_group in sorted(by_group(counts).items())
        ],
        "backlogs": [
            (row, [(message_link(site, message) if site else message, failures) for message, failures in row.most_repeated[:3]])
            for row in backlogs
        ],
        "backlog_drawings": [_backlog(nth, row) for nth, row in enumerate(backlogs[:CHARTS_SHOWN]) if row.minutes],
        "shares": [f"p{share * 100:g}" for share in SHARES],
        "latencies": [
            (hop, count, ["" if known is None else format_seconds(known) for known in seconds.values()])
            for hop, count, seconds in latencies
        ],
        "latency_drawings": [_latency(nth, begin, end, of_hop) for nth, of_hop in enumerate(series)],
        "hidden_hops": max(0, len(latencies) - len(series)),
    }


def _stages(run: AuditRun) -> list[dict[str, Any]]:
    """Return the four stages, each with the number of its messages, and of the messages that are lost there."""
    sums: Counter[str] = Counter()
    for counts in run.counts.values():
        sums.update(counts)
        for of_group in by_group(counts).values():
            sums.update(of_group)
    lost: Counter[str] = Counter()
    losses = AuditFinding.objects.filter(run=run, kind=FindingKind.LOST).values_list("subject", "stage")
    for subject, stage, count in losses.annotate(Sum("count")).order_by():
        lost[Stage.BUSINESS if subject else stage] += count
    stages = {
        Stage.BUSINESS: (_("Business"), lost[Stage.BUSINESS], _("rows without a message")),
        Stage.OUTBOX: (
            _("Outbox"),
            sums["assigned"],
            _("numbered; sent: {}, dead or discarded: {}").format(number(sums["sent"]), number(sums["explained"])),
        ),
        Stage.BROKER: (_("Broker"), sums["broker"], _("stored")),
        Stage.INBOX: (
            _("Inbox"),
            sums["handled"],
            _("handled; unread: {}, dead: {}").format(number(sums["unread"]), number(sums["dead letters"])),
        ),
    }
    return [
        {"name": name, "number": number(count), "tone": "bad" if lost[stage] else "good"}
        | {"text": text if stage is Stage.BUSINESS else _("{}; lost here: {}").format(text, number(lost[stage]))}
        for stage, (name, count, text) in stages.items()
    ]


def _losses(connection: database.Connection, run: AuditRun) -> dict[str, Any]:
    """Return the chart of lost messages by the time at which they were published; empty if no id is known."""
    begins_at, ends_at, counts = losses(connection, run.pk)
    if not begins_at or not ends_at:
        return {}
    return drawing(
        "outbox-losses",
        _("Lost messages"),
        _("By the time of publishing, as far as ids are known: {}.").format(number(sum(counts))),
        {_("lost"): counts},
        begins_at=begins_at,
        ends_at=ends_at,
        say=number,
    )

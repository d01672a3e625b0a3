"""The admin of findings: an operator sends lost messages again, or acknowledges the finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from outbox.admin.base import ReadOnlyAdmin, TopicFilter, choice_filter
from outbox.admin.impact import BulkAct, as_of, chosen_rows, impact_page, notify, reason_form, write_log
from outbox.admin.links import about_link, message_link
from outbox.admin.lists import Filter
from outbox.admin.pages import may_see, url_of
from outbox.admin.text import badge, shown
from outbox.database import guarded
from outbox.pipeline import repair
from outbox.pipeline.models import AuditFinding, AuditRun
from outbox.pipeline.spark.findings import FindingKind, Stage

AT_ONCE = 200  # findings
RUNS_OFFERED = 20
LINKS_SHOWN = 100

RESEND = BulkAct(
    "resend",
    "Send lost messages again",
    "Send again",
    "Messages to send again",
    "Relays send them again under their old numbers; groups that have handled them drop them. Messages that only one group lost "
    "are delivered to that group alone, if the broker deduplicates sends.",
)
ACKNOWLEDGE = BulkAct(
    "acknowledge", "Acknowledge findings", "Acknowledge", "Findings to acknowledge", "They are closed. No message is sent."
)


class RunFilter(Filter):
    """Filter findings by audit."""

    title = "audit"
    parameter_name = "run"
    is_indexed = True

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        newest = AuditRun.objects.filter(found__gt=0).order_by("-id").values_list("id", flat=True)[:RUNS_OFFERED]
        return [(str(number), f"audit {number}") for number in newest]

    def has_output(self) -> bool:
        return True

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = str(self.value() or "")
        if not value:
            return queryset
        return queryset.filter(run=int(value)) if value.isdecimal() and len(value) < 19 else queryset.none()


class FindingStateFilter(Filter):
    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("open", "open"), ("sent", "sent again"), ("acknowledged", "acknowledged")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.value():
            case "open":
                return queryset.filter(resent_at=None, acknowledged_at=None)
            case "sent":
                return queryset.exclude(resent_at=None)
            case "acknowledged":
                return queryset.exclude(acknowledged_at=None)
        return queryset


def state_badge(row: AuditFinding) -> SafeString:
    """Return a badge that says whether a finding is open, acknowledged or repaired."""
    if row.resent_at:
        return badge(f"{row.resent_count} sent again", "good")
    return badge("acknowledged", "plain") if row.acknowledged_at else badge("open", "bad")


@admin.register(AuditFinding)
class AuditFindingAdmin(ReadOnlyAdmin):
    list_display = ["shown_text", "audit", "state", "count", "names"]
    list_filter = [
        FindingStateFilter,
        RunFilter,
        choice_filter("kind", [str(kind) for kind in FindingKind]),
        choice_filter("stage", [str(stage) for stage in Stage]),
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

    @admin.display(description="finding")
    def shown_text(self, row: AuditFinding) -> SafeString:
        return shown(row.text, 300)

    def audit(self, row: AuditFinding) -> str:
        return str(row.run_id)

    def state(self, row: AuditFinding) -> SafeString:
        return state_badge(row)

    @admin.display(description="")
    def names(self, row: AuditFinding) -> SafeString:
        links = [message_link(self.admin_site, message_id) for message_id in row.message_ids[:2]]
        return format_html("{} {}", links[0], links[1]) if len(links) == 2 else links[0] if links else SafeString("")

    @admin.action(description="Send lost messages again", permissions=["resend"])
    def resend(self, request: HttpRequest, queryset: QuerySet[AuditFinding]) -> HttpResponse | None:
        """Ask for a confirmation and a reason, then send what can be sent; each finding is logged in its transaction."""
        using = router.db_for_write(AuditFinding)
        plans = [repair.plan(finding, using) for finding in queryset.select_related("run").order_by("id")[:AT_ONCE]]
        counts, refused = repair.counts(plans), repair.refusals(plans)
        form = reason_form(request, count=sum(counts.values()), at=as_of(request))
        if form.count and not form.is_valid():
            notes = [f"Not sent: {number}. {reason}" for reason, number in refused.items()]
            return impact_page(
                self, request, act=RESEND, form=form, counts=counts, hidden=chosen_rows(request), limit=form.count, notes=notes
            )
        done = self._send(request, plans, using, form.cleaned_data["reason"]) if form.count else 0
        for reason, number in refused.items():
            self.message_user(request, f"Not sent: {number}. {reason}", messages.WARNING)
        if done or form.wanted:
            notify(self, request, RESEND, done=done, wanted=form.wanted, limit=form.count)
        return None

    def _send(self, request: HttpRequest, plans: Sequence[repair.ResendPlan], using: str, reason: str) -> int:
        done = 0
        for plan in plans:
            with guarded.atomic(using):
                sent = repair.send(plan.finding.pk, using, by=request.user.get_username())
                if sent.ids:
                    text = f"{len(sent.ids)} sent again. Reason: {reason}"
                    write_log(request, AuditFinding, {str(plan.finding.pk): plan.finding.text}, text)
            done += len(sent.ids)
        return done

    @admin.action(description="Acknowledge with note", permissions=["acknowledge"])
    def acknowledge(self, request: HttpRequest, queryset: QuerySet[AuditFinding]) -> HttpResponse | None:
        """Ask for a note, then close the open findings."""
        chosen = list(queryset.filter(acknowledged_at=None).order_by("id")[:AT_ONCE])
        counts: dict[str, int] = {}
        for finding in chosen:
            counts[finding.topic] = counts.get(finding.topic, 0) + 1
        form = reason_form(request, count=len(chosen), at=as_of(request))
        if chosen and not form.is_valid():
            return impact_page(
                self, request, act=ACKNOWLEDGE, form=form, counts=counts, hidden=chosen_rows(request), limit=AT_ONCE
            )
        done = self._close(request, chosen, form.cleaned_data["reason"]) if chosen else 0
        notify(self, request, ACKNOWLEDGE, done=done, wanted=form.wanted, limit=AT_ONCE)
        return None

    def _close(self, request: HttpRequest, chosen: list[AuditFinding], note: str) -> int:
        using = router.db_for_write(AuditFinding)
        who = {"acknowledged_at": timezone.now(), "acknowledged_by": request.user.get_username(), "note": note}
        with guarded.atomic(using):
            rows = AuditFinding.objects.using(using).filter(pk__in=[finding.pk for finding in chosen], acknowledged_at=None)
            done = {str(finding.pk): finding.text for finding in rows.select_for_update()}
            rows.update(**who)
            write_log(request, AuditFinding, done, f"Acknowledged. Note: {note}")
        return len(done)

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
            "title": f"Finding {row.pk} of {row.run}",
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

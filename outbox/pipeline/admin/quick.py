"""The quick check: a look at the last minutes or hours by SQL, when a person asks for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
from django.contrib.admin import ModelAdmin
from django.db import router
from django.http import HttpRequest
from django.template.response import TemplateResponse

from outbox.admin.links import message_link
from outbox.admin.pages import frame
from outbox.admin.text import shown
from outbox.errors import OutboxError
from outbox.monitoring.text import age
from outbox.pipeline.admin.standing import Backlog, standing
from outbox.pipeline.audit_runs.latency import Percentiles
from outbox.pipeline.models import AuditRun
from outbox.pipeline.quick_check.check import LOOKED_AT, SECONDS, SETTLE, Answer, quick_check
from outbox.pipeline.spark.bins import SHARES, add, percentile

WINDOWS = {"15min": timedelta(minutes=15), "1h": timedelta(hours=1), "6h": timedelta(hours=6), "24h": timedelta(days=1)}
FINDINGS_SHOWN = 200


def quick_check_page(model_admin: ModelAdmin, request: HttpRequest) -> TemplateResponse:
    """Show which windows there are, or what one holds."""
    site = model_admin.admin_site
    context: dict[str, Any] = {
        **site.each_context(request),
        **frame(site, request),
        "title": "Quick check",
        "opts": model_admin.opts,
        "media": model_admin.media,
        "windows": list(WINDOWS),
        "chosen": request.GET.get("window", ""),
        "looked_at": f"{LOOKED_AT:,}",
        "seconds": SECONDS,
        "settle": age(SETTLE.total_seconds()),
    }
    length = WINDOWS.get(context["chosen"])
    if length is not None:
        try:
            answer = quick_check(router.db_for_read(AuditRun) or "default", length=length)
        except (OutboxError, psycopg.Error) as error:
            context["trouble"] = shown(str(error).strip())
        else:
            context |= _told(model_admin, answer)
    return TemplateResponse(request, "admin/outbox_pipeline/quick_check.html", context)


def _told(model_admin: ModelAdmin, answer: Answer) -> dict[str, Any]:
    site = model_admin.admin_site
    findings = [
        {"text": shown(str(one), 300), "count": one.count, "links": [message_link(site, number) for number in one.ids[:3]]}
        | {"about": shown(", ".join(one.about[:3]))}
        for one in answer.findings[:FINDINGS_SHOWN]
    ]
    backlogs = [
        Backlog(
            *(one.group, one.topic, last.backlog, last.growth, last.cause),
            onset=None if last.onset is None else answer.as_of.fromtimestamp(last.onset * 60, answer.as_of.tzinfo),
            again=one.again,
            minutes=[[at.minute * 60, at.backlog] for at in one.minutes],
        )
        for one in answer.backlogs
        for last in one.minutes[-1:]
    ]
    return {
        "answer": answer,
        "took": age(answer.seconds),
        "findings": findings,
        "more": max(0, len(answer.findings) - len(findings)),
        "rows": sorted(answer.rows.items()),
        "notes": [shown(note, 500) for note in answer.notes],
        **standing(site, backlogs=backlogs, latencies=_percentiles(answer), courses=[]),
        "hidden_hops": 0,
    }


def _percentiles(answer: Answer) -> list[Percentiles]:
    whole: dict[tuple[str, str, str], dict[int, int]] = {}
    for topic, hop, group, _, place, count in answer.histograms:
        whole[topic, hop, group] = add(whole.get((topic, hop, group), {}), {place: count})
    found = [
        Percentiles(hop, sum(bins.values()), {share: percentile(bins, share) for share in SHARES}) for hop, bins in whole.items()
    ]
    return sorted(found, key=lambda one: (-(one.seconds[0.99] or 0), one.hop))

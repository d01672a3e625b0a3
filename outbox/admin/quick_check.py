"""The quick check's page: how far the messages of the last hours or of a day have come, read when a person asks for it."""

from __future__ import annotations

from datetime import datetime, time, timedelta
from typing import Any

import psycopg
from django.contrib.admin import ModelAdmin
from django.db import router
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.dateparse import parse_date

from outbox import conf, database
from outbox.admin.pages import frame
from outbox.admin.text import aware, shown
from outbox.admin.times import FIRST_YEAR, LAST_YEAR
from outbox.errors import OutboxError
from outbox.models import MessageRow
from outbox.monitoring.quick_check import MESSAGE_LIMIT, Progress, read_progress
from outbox.monitoring.text import age

WINDOWS = {"15min": timedelta(minutes=15), "1h": timedelta(hours=1), "6h": timedelta(hours=6), "24h": timedelta(days=1)}
STATEMENT_TIMEOUT = {"statement_timeout": "15s"}  # as long as a person waits for a page
SHARES = ("p50", "p95", "p99")


def quick_check(model_admin: ModelAdmin, request: HttpRequest) -> TemplateResponse:
    """Show which windows there are, or what one or a day holds."""
    site = model_admin.admin_site
    context: dict[str, Any] = {
        **site.each_context(request),
        **frame(site, request),
        "title": "Quick check",
        "opts": model_admin.opts,
        "media": model_admin.media,
        "windows": list(WINDOWS),
        "chosen": request.GET.get("window", ""),
        "day": "" if request.GET.get("window") else request.GET.get("day", ""),
        "shares": SHARES,
        "looked_at": f"{MESSAGE_LIMIT:,}",
    }
    length, now = WINDOWS.get(context["chosen"]), aware(timezone.now())
    day = None if length or not context["day"] else _day(context["day"])
    if context["day"] and day is None:
        context["trouble"] = "This is not a day. Write it as 2026-03-01."
    elif day is not None and day[0] < now - conf.settings().retention:
        context["trouble"] = 'The day began longer ago than OUTBOX["RETENTION"], so messages of it may have been pruned.'
    elif length is not None or day is not None:
        begin, end = day or (now - (length or timedelta()), None)
        try:
            context |= _answer(now, begin, end)
        except psycopg.errors.QueryCanceled:
            context["trouble"] = "It takes too long to look at. Choose a shorter window."
        except (OutboxError, psycopg.Error) as error:
            context["trouble"] = shown(str(error).strip())
    return TemplateResponse(request, "admin/outbox/quick_check.html", context)


def _day(text: str) -> tuple[datetime, datetime] | None:
    """Return the begin and the end of a day in the current time zone; None where the text is not a day."""
    try:
        day = parse_date(text)
    except ValueError:
        return None
    if day is None or not FIRST_YEAR <= day.year <= LAST_YEAR:
        return None
    begin, end = (datetime.combine(one, time()) for one in (day, day + timedelta(days=1)))
    return timezone.make_aware(begin), timezone.make_aware(end)


def _answer(now: datetime, begin: datetime, end: datetime | None) -> dict[str, Any]:
    using = router.db_for_read(MessageRow) or "default"
    with database.connect(using, application_name="outbox quick check", settings=STATEMENT_TIMEOUT) as connection:
        found = read_progress(connection, using, now=now, begin=begin, end=end)
    published = sum(one.messages for one in found if not one.consumer_group)
    return {
        "answer": {
            "as_of": timezone.now(),
            "missing": sum(one.missing for one in found),
            "given_up": sum(one.given_up for one in found),
        }
        | {"published": published, "is_cut": published >= MESSAGE_LIMIT},
        "rows": [_row(one) for one in found],
    }


def _row(one: Progress) -> dict[str, Any]:
    return {"topic": one.topic, "group": one.consumer_group, "messages": one.messages, "done": one.done} | {
        "under_way": one.under_way,
        "given_up": one.given_up,
        "missing": one.missing,
        "latencies": [age(seconds) for seconds in one.seconds] if one.seconds else [""] * len(SHARES),
    }

"""The overview: the state of everything on one page, read with a limited number of queries, each with a timeout."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.contrib.admin import ModelAdmin
from django.db import router
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from outbox import database
from outbox.admin.lines import drawing
from outbox.admin.pages import frame, may_see
from outbox.admin.text import Text, number, shown
from outbox.database import Connection
from outbox.errors import TablesLocked
from outbox.models import MessageRow
from outbox.monitoring.attention import find_attention
from outbox.monitoring.connection import bounded
from outbox.monitoring.groups import GroupStatus
from outbox.monitoring.processes import ProcessStatus, is_replaced
from outbox.monitoring.status import MINUTES, ROW_LIMIT, Status, TopicStatus, read_status, read_throughput
from outbox.monitoring.text import age


def overview(model_admin: ModelAdmin, request: HttpRequest) -> TemplateResponse:
    """Show the state of the outbox."""
    using = router.db_for_read(MessageRow) or "default"
    connection = database.raw(using)
    framed = frame(model_admin.admin_site, request)
    urls = {link["name"]: link["url"] for link in framed["outbox_links"]}
    context = {
        **model_admin.admin_site.each_context(request),
        **framed,
        "title": _("Outbox overview"),
        "opts": model_admin.opts,
        "media": model_admin.media,
    }
    has_errors = may_see(model_admin.admin_site, MessageRow, request)  # a handler's error may contain data of a message
    try:
        with bounded(using, connection):
            context |= _read(using, connection, urls, has_errors=has_errors)
    except TablesLocked as error:
        context["attention"] = [{"subject": f"database {using!r}", "cause": shown(error.message, 500), "step": error.hint}]
    return TemplateResponse(request, "admin/outbox/overview.html", context)


def _read(using: str, connection: Connection, urls: dict[str, str], *, has_errors: bool) -> dict[str, Any]:
    status = read_status(connection, using)
    return {
        "status": status,
        "attention": [
            {
                "id": finding.id,
                "subject": finding.obj,
                "since": finding.since,
                "cause": shown(finding.msg, 500),
                "step": finding.hint,
            }
            | {"error": shown(finding.error.rstrip("."), 500) if has_errors else ""}
            for finding in find_attention(connection, status)
        ],
        "cards": [card | {"url": urls.get(card["name"], "")} for card in _cards(status)],
        "topics": [_topic(topic, urls.get(str(_("Messages")), "")) for topic in status.topics],
        "processes": [_process(process) for process in status.processes if not _is_history(process, status)],
        "replaced": [_process(process) for process in status.processes if _is_history(process, status)],
        "groups": [row for group in status.groups for row in _group(group)],
        "failures": [
            {
                "group": failure.consumer_group,
                "topic": failure.topic,
                "deliveries": failure.deliveries,
                "messages": failure.messages,
            }
            | {"dead_letters": failure.dead_letters, "newest": age(failure.newest_seconds)}
            | {"error": shown(failure.error, 300) if has_errors else ""}
            for failure in status.failures
        ],
        "has_errors": has_errors,
        "chart": _chart(connection, timezone.now()),
    }


def _chart(connection: Connection, now: datetime) -> dict[str, Any]:
    """Return the drawing of messages published and handled in the last hour."""
    published, handled = read_throughput(connection, now=now)
    known = [count for count in published + handled if count is not None]
    text = _("In the last hour {} messages were published and {} handled, at most {} in a minute.").format(
        number(sum(filter(None, published))), number(sum(filter(None, handled))), number(max(known, default=0))
    )
    if len(known) < len(published + handled):
        text += " " + _("Only the newest {} of each were counted; older ones are not shown.").format(number(ROW_LIMIT))
    return drawing(
        "outbox-flow",
        _("Messages published and handled, per minute"),
        text,
        {_("published"): published, _("handled, once for each group"): handled},
        begins_at=now - timedelta(minutes=MINUTES),
        ends_at=now,
        say=number,
    )


def _cards(status: Status) -> list[dict[str, Any]]:
    waiting = sum(topic.waiting + topic.delayed + topic.released + topic.claimed for topic in status.topics)
    prepared = sum(topic.prepared for topic in status.topics)
    dead = sum(topic.dead for topic in status.topics)
    letters = sum(count.dead for count in status.deferred if not count.reason)
    parked = sum(status.parked.values())
    oldest = max((topic.oldest_seconds for topic in status.topics if topic.oldest_seconds is not None), default=None)
    silent = sum(process.is_silent and not _is_history(process, status) for process in status.processes)
    alive = sum(not process.is_silent for process in status.processes)
    tone = "waiting" if alive and silent else "good" if alive else "bad"
    return [
        _card(
            _("Backlog"),
            waiting,
            _("oldest {}").format(age(oldest)) if waiting else _("nothing waits"),
            "waiting" if waiting else "good",
        ),
        _card(_("Awaiting commit"), prepared, _("half messages, decided"), "plain"),
        _card(_("Dead messages"), dead, _("rejected by the broker"), "bad" if dead else "good"),
        _card(_("Deferred messages"), letters, _("dead letters, failed in a consumer group"), "bad" if letters else "good"),
        _card(_("Half messages"), parked, _("check-back unanswered"), "bad" if parked else "good"),
        _card(_("Processes"), alive, _("running, {} silent").format(silent) if silent else _("all running"), tone),
    ]


def _card(name: Text, count: int, text: Text, tone: str) -> dict[str, Any]:
    return {"name": name, "number": count, "text": text, "tone": tone}


def _topic(topic: TopicStatus, messages: str) -> dict[str, Any]:
    counts = [
        (state, getattr(topic, state), messages and f"{messages}?topic={topic.name}&state={state}")
        for state in ("waiting", "delayed", "released", "claimed", "prepared", "dead")
    ]
    return {"name": topic.name, "type": topic.type, "broker": topic.broker, "counts": counts} | {
        "oldest": age(topic.oldest_seconds),
        "failures": topic.failures,
        "pause": topic.pause,
    }


def _process(process: ProcessStatus) -> dict[str, Any]:
    return {
        "kind": process.kind,
        "where": f"{process.host}:{process.pid}",
        "broker": process.broker,
        "group": process.consumer_group,
        "lane": process.lane,
        "breaker": process.breaker if process.kind == "relay" else "",
        "fails": ", ".join(sorted(process.errors)),
        "heartbeat": age(process.silent_seconds),
        "is_silent": process.is_silent,
    }


def _is_history(process: ProcessStatus, status: Status) -> bool:
    """Return whether a process is silent because others have replaced it."""
    return process.is_silent and is_replaced(process, status.processes)


def _group(group: GroupStatus) -> list[dict[str, Any]]:
    return [
        {
            "name": group.consumer_group,
            "topic": topic,
            "waiting": "?" if group.trouble else group.waiting.get(topic, 0),
            "deferred": count.waiting + count.held if (count := group.deferred.get(topic)) else 0,
            "letters": count.dead if count else 0,
            "consumers": group.consumers,
            "per_minute": f"{group.progress[topic].per_minute:.0f}",
            "ignored": f"{group.progress[topic].ignored_per_minute:.0f}",
        }
        for topic in group.topics
    ]

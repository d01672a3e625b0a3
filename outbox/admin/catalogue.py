"""The catalogue's page: message types by topic, with promises, handlers, and counts of the newest messages."""

from __future__ import annotations

import json
from typing import Any

import psycopg
from django.contrib.admin import ModelAdmin
from django.db import router
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy as _

from outbox import database
from outbox.admin.pages import frame
from outbox.admin.text import moment, number, shown
from outbox.catalogue.entries import HandlerEntry, TopicEntry, TypeEntry, read_entries
from outbox.catalogue.traffic import NEWEST, Traffic, read_traffic
from outbox.errors import OutboxError
from outbox.models import MessageRow

STATEMENT_TIMEOUT = {"statement_timeout": "15s"}  # a person waits for the page
MAX_SCHEMA_CHARACTERS = 20_000


def catalogue(model_admin: ModelAdmin, request: HttpRequest) -> TemplateResponse:
    """Show the catalogue. If the database does not answer, show only the facts that are in code and settings."""
    site = model_admin.admin_site
    context: dict[str, Any] = {
        **site.each_context(request),
        **frame(site, request),
        "title": _("Catalogue"),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "newest": number(NEWEST),
        "topics": [],
    }
    traffic: list[Traffic] = []
    using = router.db_for_read(MessageRow) or "default"
    try:
        with database.connect(using, application_name="outbox catalogue", settings=STATEMENT_TIMEOUT) as connection:
            traffic = read_traffic(connection)
    except psycopg.errors.QueryCanceled:
        context["trouble"] = _("Reading the newest messages took too long, so this page shows only code and settings.")
    except (OutboxError, psycopg.Error) as error:
        context["trouble"] = shown(str(error).strip())
    context["topics"] = [_topic(topic, [row for row in traffic if row.topic == topic.name]) for topic in read_entries()]
    return TemplateResponse(request, "admin/outbox/catalogue.html", context)


def _topic(topic: TopicEntry, traffic: list[Traffic]) -> dict[str, Any]:
    declared = {kind.name for kind in topic.types}
    promise = topic.promise
    return {
        "name": topic.name,
        "broker": topic.broker,
        "type": topic.type,
        "promises": [promise.published, promise.order, promise.duplicates, promise.check_backs] if promise else [],
        "types": [_type(kind, topic, traffic) for kind in topic.types],
        "others": [
            _published(row) | {"name": row.type or _("without a type")}
            for row in traffic
            if not row.consumer_group and row.type not in declared
        ],
        "handlers": [_handler(handler, _traffic_of(handler, topic, traffic)) for handler in topic.handlers if not handler.takes],
    }


def _traffic_of(handler: HandlerEntry, topic: TopicEntry, traffic: list[Traffic]) -> list[Traffic]:
    """Return the traffic of a handler of a topic, which gets all types except those with another handler of its group."""
    return [row for row in traffic if handler in topic.handlers_of(row.type)]


def _type(kind: TypeEntry, topic: TopicEntry, traffic: list[Traffic]) -> dict[str, Any]:
    of_type = [row for row in traffic if row.type == kind.name]
    published = [_published(row) for row in of_type if not row.consumer_group]
    return {
        "name": kind.name,
        "location": kind.location,
        "description": shown(kind.description),
        "version": kind.version,
        "upgrades": ", ".join(map(str, kind.upgrades)),
        "key": kind.key,
        "published": published[0] if published else None,
        "handlers": [_handler(handler, of_type) for handler in topic.handlers_of(kind.name)],
        "trouble": shown(kind.trouble),
        "example": "" if kind.example is None else json.dumps(kind.example, indent=2),
        "schema": shown(json.dumps(kind.schema, indent=2), MAX_SCHEMA_CHARACTERS),
    }


def _published(traffic: Traffic) -> dict[str, Any]:
    return {"messages": number(traffic.messages), "at": moment(traffic.last_at)}


def _handler(handler: HandlerEntry, traffic: list[Traffic]) -> dict[str, Any]:
    rows = [row for row in traffic if row.consumer_group == handler.group]
    messages, failed = sum(row.messages for row in rows), sum(row.failed for row in rows)
    last = max((row.last_at for row in rows if row.last_at), default=None)
    return {
        "group": handler.group,
        "name": handler.name,
        "tags": ", ".join(handler.tags),
        "retry": handler.retry,
        "using": handler.using,
        "messages": number(messages),
        "at": moment(last),
        "failed": f"{failed / messages:.1%}" if messages else "",
        "has_failed": failed > 0,
    }

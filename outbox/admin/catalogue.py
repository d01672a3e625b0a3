"""The catalogue's page: message types by topic, with what is promised, who handles them, and what became of the newest ones."""

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

STATEMENT_TIMEOUT = {"statement_timeout": "15s"}  # as long as a person waits for a page
MOST_SHOWN = 20_000  # characters of a schema


def catalogue(model_admin: ModelAdmin, request: HttpRequest) -> TemplateResponse:
    """Show the catalogue. Without an answer of the database, what code and settings say is shown all the same."""
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
        context["trouble"] = _("The newest messages take too long to look at, so this is only what the code says.")
    except (OutboxError, psycopg.Error) as error:
        context["trouble"] = shown(str(error).strip())
    context["topics"] = [_topic(topic, [row for row in traffic if row.topic == topic.name]) for topic in read_entries()]
    return TemplateResponse(request, "admin/outbox/catalogue.html", context)


def _topic(topic: TopicEntry, traffic: list[Traffic]) -> dict[str, Any]:
    named = {kind.name for kind in topic.types}
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
            if not row.consumer_group and row.type not in named
        ],
        "handlers": [_handler(handler, _rest(handler, topic, traffic)) for handler in topic.handlers if not handler.takes],
    }


def _rest(handler: HandlerEntry, topic: TopicEntry, traffic: list[Traffic]) -> list[Traffic]:
    """Return what a handler of a topic gets: all but the types that other handlers of its group take."""
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
        "schema": shown(json.dumps(kind.schema, indent=2), MOST_SHOWN),
    }


def _published(one: Traffic) -> dict[str, Any]:
    return {"messages": number(one.messages), "at": moment(one.last_at)}


def _handler(one: HandlerEntry, traffic: list[Traffic]) -> dict[str, Any]:
    rows = [row for row in traffic if row.consumer_group == one.group]
    messages, failed = sum(row.messages for row in rows), sum(row.failed for row in rows)
    last = max((row.last_at for row in rows if row.last_at), default=None)
    return {
        "group": one.group,
        "name": one.name,
        "tags": ", ".join(one.tags),
        "retry": one.retry,
        "using": one.using,
        "messages": number(messages),
        "at": moment(last),
        "failed": f"{failed / messages:.1%}" if messages else "",
        "has_failed": failed > 0,
    }

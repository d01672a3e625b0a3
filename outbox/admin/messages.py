"""Messages: the list, and the timeline of each message."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db import router
from django.db.models import Q, QuerySet
from django.db.models.expressions import RawSQL
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox import conf, database
from outbox.admin.base import ReadOnlyAdmin, TopicFilter
from outbox.admin.body_preview import is_field_shown
from outbox.admin.contents import contents, read_beginning
from outbox.admin.links import about_link, message_link
from outbox.admin.lists import MAX_COUNTED, Filter, UnindexedResult
from outbox.admin.pages import may_see, topics, url_of
from outbox.admin.state_badges import state_badges
from outbox.admin.text import Text, badge, moment, shown, since
from outbox.admin.times import Time
from outbox.brokers.base import StoredCopy
from outbox.brokers.capabilities import Lookups
from outbox.consuming.acts import read_group_states
from outbox.errors import BrokerUnavailable
from outbox.extensions import Extension, extensions
from outbox.ids import made_at
from outbox.message import Header, message_types, read_headers
from outbox.models import DeadMessage, Deferred, Delayed, MessageRow, MessageState, Ticket
from outbox.monitoring.find import FIRST_ID, LAST_ID, MAX_SECONDS, find_by_field, has_id, is_field_search, is_key_or_row, parse
from outbox.monitoring.timeline import Timeline, TimelineEntry, read_timeline
from outbox.monitoring.why import why

MessageStatus = MessageState.MessageStatus

# Ids of messages by the state of their batch, found with the index of unfinished batches, or of dead ones. The limit is in this
# query, since without it, the planner would choose a nested loop for up to a million ids.
IN_BATCHES = """
SELECT u.id FROM outbox_batch b, unnest(b.message_ids) WITH ORDINALITY u(id, n)
WHERE {where} AND u.n <> ALL(b.split) AND u.id < %s AND u.id >= %s AND (%s::int[] IS NULL OR b.topic_id = ANY(%s::int[]))
ORDER BY u.id DESC LIMIT %s
"""

TOO_LATE = _("The search took longer than {:.0f} s. Choose a shorter time.")

BATCHES = {
    MessageStatus.CLAIMED: "b.state = 1",
    MessageStatus.PREPARED: "b.state = 2",
    MessageStatus.RELEASED: "b.state = 0 AND b.failures = 0",
    MessageStatus.RETRYING: "b.state = 0 AND b.failures > 0",
    MessageStatus.DEAD: "b.state = 4",
}


class StateFilter(Filter):
    """Filter by state. Unfinished and dead messages are found from their ticket or batch, however old they are."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Text]]:
        return list(MessageStatus.choices)

    @property
    def is_indexed(self) -> bool:  # type: ignore[override]
        return self.value() not in (MessageStatus.SENT, MessageStatus.LOST)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        state = self.value()
        match state:
            case MessageStatus.WAITING:
                return queryset.filter(id__in=Ticket.objects.values("message_id"))
            case MessageStatus.DELAYED:
                return queryset.filter(id__in=Delayed.objects.values("message_id"))
            case MessageStatus.DISCARDED:
                discarded = MessageState.objects.filter(state=state, id__in=DeadMessage.objects.values("message_id"))
                return queryset.filter(id__in=discarded.values("id"))
            case _:  # `narrow` filters by the other states, since it has the bounds of the list
                return queryset if state is None or state in MessageStatus.values else queryset.none()


class TopicIdFilter(TopicFilter):
    """Filter by topic in the table of messages, which has no index on the topic."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[MessageRow]) -> QuerySet[MessageRow]:
        if self.value() is None:
            return queryset
        return queryset.filter(topic_id__in=[topic.id for topic in topics(request) if topic.name == self.value()])


class TypeFilter(Filter):
    """Filter by message type, with a search in the headers, whose encoding is that of `publish()`."""

    title = _("type")
    parameter_name = "type"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in sorted(message_types())]

    def queryset(self, request: HttpRequest, queryset: QuerySet[MessageRow]) -> QuerySet[MessageRow]:
        if self.value() is None:
            return queryset
        return queryset.filter(headers__contains=f'"{Header.TYPE}":{json.dumps(self.value(), ensure_ascii=False)}')


@admin.register(MessageRow)
class MessageAdmin(ReadOnlyAdmin):
    list_display = ["recorded", "state", "topic", "type", "shown_key", "age", "attempt", "reason"]
    list_filter = [StateFilter, TopicIdFilter, TypeFilter]
    search_fields = ["id", "key", "about"]
    search_help_text = _(
        "A message id, a key, the row that the message is about (shop.order:4711), or a field of the body (invoice=536365, "
        "customer.id=7), which is looked for in the time chosen. Exact matches only."
    )
    fields = ()
    time = "created_at"
    time_is = Time.IN_IDS
    pages = ("changelist", "change")

    def get_queryset(self, request: HttpRequest) -> QuerySet[MessageRow]:
        return super().get_queryset(request).exclude(topic_id=0).defer("body")

    def search(self, rows: QuerySet[MessageRow], text: str) -> QuerySet[MessageRow]:
        connection, search = database.raw(rows.db), parse(text)
        if search.id and has_id(connection, search):
            return rows.filter(id=search.id)
        if is_field_search(connection, search):  # `search_unindexed` filters, since it has the bounds of the list
            return rows
        return rows.filter(Q(key=search.text) & ~Q(key="") | Q(about__in=search.about))

    def search_unindexed(self, request: HttpRequest, text: str, bounds: dict[str, Any]) -> UnindexedResult | None:
        """Search a field of bodies; users who may not view masked fields cannot search them either."""
        connection, search = database.raw(router.db_for_read(MessageRow)), parse(text)
        if not is_field_search(connection, search):
            return None
        first, end = bounds.get("id__gte", FIRST_ID), bounds.get("id__lt", LAST_ID)
        allowed = {} if request.user.has_perm("outbox.view_body") else {"may_read": is_field_shown}
        by_field = find_by_field(connection, search, first=first, end=end, limit=MAX_COUNTED + 1, **allowed)
        if by_field.reached is not None:
            late_text = _("Bodies have no index: only messages since {} were read within {:.0f} s.")
            sentence = late_text if by_field.is_late else _("Bodies have no index: only messages since {} were read.")
            note = format_html(str(sentence), moment(made_at(by_field.reached)), MAX_SECONDS)
            return by_field.ids, by_field.reached, note
        return by_field.ids, None, TOO_LATE.format(MAX_SECONDS) if by_field.is_late else ""

    def narrow(self, rows: QuerySet[Any], request: HttpRequest, bounds: dict[str, Any]) -> QuerySet[Any]:
        """Filter messages by their state; return at most one more than a list counts."""
        state, topic = request.GET.get("state"), request.GET.get("topic")
        is_search = bool(request.GET.get("q", "").strip())
        if is_search and state in (*BATCHES, MessageStatus.SENT, MessageStatus.LOST):  # a search finds few rows
            return rows.filter(id__in=MessageState.objects.filter(state=state, id__in=rows.values("id")).values("id"))
        if state in BATCHES:
            chosen = [known.id for known in topics(request) if known.name == topic] if topic else None
            arguments = [bounds.get("id__lt", LAST_ID), bounds.get("id__gte", FIRST_ID), chosen, chosen, MAX_COUNTED + 1]
            return rows.filter(id__in=RawSQL(IN_BATCHES.format(where=BATCHES[MessageStatus(state)]), arguments))  # noqa: S611  (constants)
        if state in (MessageStatus.SENT, MessageStatus.LOST):  # no index has them, so read the view from its newest rows
            in_state = MessageState.objects.filter(state=state, **bounds)
            in_state = in_state.filter(topic=topic) if topic else in_state
            return rows.filter(id__in=in_state.order_by("-id").values("id")[: MAX_COUNTED + 1])
        return rows

    def complete(self, request: HttpRequest, rows: list[MessageRow]) -> None:
        ids = [row.id for row in rows]
        current, ended = MessageState.objects.in_bulk(ids), read_group_states(ids, router.db_for_read(MessageRow))
        for row in rows:
            row.current = current.get(row.id)  # type: ignore[attr-defined]
            row.ended = ended.get(row.id, [])  # type: ignore[attr-defined]

    @admin.display(description=_("recorded"))
    def recorded(self, row: MessageRow) -> SafeString:
        return moment(row.created_at)

    @admin.display(description=_("state"))
    def state(self, row: Any) -> SafeString:
        return state_badges(row.current.state, row.ended) if row.current else badge(_("gone"), "plain")

    @admin.display(description=_("topic"))
    def topic(self, row: Any) -> str:
        return row.current.topic if row.current else ""

    @admin.display(description=_("type"))
    def type(self, row: MessageRow) -> SafeString:
        """Return the message's type; of a Celery task, its name."""
        return shown(read_headers(row.headers).get(Header.TYPE, ""), 60)

    @admin.display(description=_("key"))
    def shown_key(self, row: MessageRow) -> SafeString:
        return shown(row.key, 60)

    @admin.display(description=_("age"))
    def age(self, row: MessageRow) -> str:
        return since(row.created_at)

    @admin.display(description=_("attempt"))
    def attempt(self, row: Any) -> str:
        return row.current.attempt or "" if row.current else ""

    @admin.display(description=_("reason"))
    def reason(self, row: Any) -> SafeString:
        return shown((row.current and row.current.last_error) or "", 120)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """List messages; but if the search is for an id that only the archive may have, redirect to that message's page."""
        search = parse(request.GET.get("q", ""))
        _, message_id = self._in_archive(request, search.text) if self.has_view_permission(request) else (None, None)
        if message_id and not is_key_or_row(database.raw(router.db_for_read(MessageRow)), search):
            return HttpResponseRedirect(url_of(self.admin_site, "outbox_messagerow_change", message_id))
        return super().changelist_view(request, extra_context)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        archive, message_id = self._in_archive(request, object_id or "")
        if archive and message_id:
            return archive.archived_message(self, request, message_id)
        return super().changeform_view(request, object_id, form_url, extra_context)

    def _in_archive(self, request: HttpRequest, text: str) -> tuple[Extension | None, UUID | None]:
        """Return the app whose archive may have a message, and the id that the text contains; None for both if no app may."""
        archive = next((extension for extension in extensions() if extension.has_archive()), None)
        if archive is None:
            return None, None
        try:
            message_id = UUID(text)
        except ValueError:
            return None, None
        return (None, None) if self.get_queryset(request).filter(pk=message_id).exists() else (archive, message_id)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> MessageRow | None:
        """Return a message with the size of its body, and with the beginning of the body."""
        whole = super().get_queryset(request).exclude(topic_id=0).defer("body")
        try:
            row: MessageRow = read_beginning(whole).get(pk=UUID(object_id))
        except (MessageRow.DoesNotExist, ValueError, ValidationError):
            return None
        return row

    def get_extra_context(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        headers = read_headers(row.headers)
        using = router.db_for_read(MessageRow)
        timeline = read_timeline(using, row.id)
        return {
            "title": _("Message {}").format(row.id),
            "timeline": timeline,
            "why": shown(why(database.raw(using), row.id, using=using) or "", 1000),
            "state": state_badges(timeline.state, timeline.ended) if timeline else "",
            "deferred": self._deferred(request, timeline, row.id) if timeline else [],
            "moments": [_as_shown(entry) for entry in timeline.entries] if timeline else [],
            **contents(request, headers, row.beginning, row.size),
            "key": shown(row.key),
            "age": since(row.created_at),
            "about": about_link(self.admin_site, request, row.about) if row.about else "",
            "cause": message_link(self.admin_site, headers[Header.CAUSATION_ID], short=False)
            if Header.CAUSATION_ID in headers
            else "",
            **self._at_broker(request, row, timeline),
        }

    def _deferred(self, request: HttpRequest, timeline: Timeline, message_id: UUID) -> list[tuple[str, str]]:
        """Return the groups that have deferred the message, each with the URL of its row."""
        if not may_see(self.admin_site, Deferred, request):
            return []
        url = url_of(self.admin_site, "outbox_deferred_changelist")
        groups = [group for group, _outcome, by in timeline.ended if not by]  # with `by`, an operator has discarded the message
        return [(group, f"{url}?{urlencode({'group': group, 'q': message_id})}") for group in groups]

    def _at_broker(self, request: HttpRequest, row: MessageRow, timeline: Timeline | None) -> dict[str, Any]:
        """Look the message up at the broker, but only if the user asked for it, since the broker may be slow or unreachable."""
        if "broker" not in request.GET or timeline is None:
            return {}
        if not Lookups.has(conf.broker_class(timeline.broker)):
            trouble = _("Broker {!r} does not support looking messages up.").format(timeline.broker)
            return {"is_asked": True, "found": [], "trouble": trouble}
        stored_copies: list[StoredCopy] = []
        trouble = ""
        try:
            with closing(conf.make_broker(timeline.broker)) as broker:
                stored_copies = Lookups.of(broker).find(str(row.id))
        except BrokerUnavailable as error:
            trouble = str(error)
        return {"is_asked": True, "found": stored_copies, "trouble": trouble}


def _as_shown(entry: TimelineEntry) -> dict[str, Any]:
    return {
        "at": entry.at,
        "what": entry.what,
        "text": shown(entry.text, 2000),
        "who": shown(entry.who, 100),
        "by": shown(entry.by, 200),
        "traceback": shown(entry.traceback),
        "tone": entry.severity,
    }

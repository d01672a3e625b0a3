"""
Deferred messages: messages that a consumer group knows and has not handled, including dead letters; and the acts of operators.

Their states are in `outbox/consuming/acts.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Count, Max, Min, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox import database
from outbox.admin.base import ReadOnlyAdmin
from outbox.admin.body_preview import size_in_words
from outbox.admin.contents import contents, read_beginning
from outbox.admin.impact import BulkAct, as_of, chosen_rows, impact_page, logged, notify, reason_form, write_log
from outbox.admin.links import message_link
from outbox.admin.lists import Filter
from outbox.admin.pages import url_of
from outbox.admin.text import Text, badge, moment, plain, shown, since
from outbox.consuming.acts import APPLIES, STATES, DeferredState, deferred_databases, settle
from outbox.consuming.deferred import HELD
from outbox.consuming.delivery_info import uuid_of
from outbox.logs import cut
from outbox.message import read_headers
from outbox.models import Act, Deferred, MessageRow
from outbox.monitoring.deferred import read_deferred, read_sleeping_keys
from outbox.monitoring.processes import read_processes
from outbox.monitoring.text import age

MAX_PER_REQUEST = 10_000
KINDS_SHOWN = 20
VALUES_SHOWN = 30  # choices of a filter
KINDS_ON_CONFIRMATION = 5
KEYS_SHOWN = 10
COLUMNS = ("consumer_group", "topic", "type", "reason", "fingerprint")

ACTS = {
    Act.RETRIED_NOW: BulkAct(
        "replay", _("Retry deferred messages now"), _("Retry now"), _("Due now"), _("Their groups handle them at once.")
    ),
    Act.HELD: BulkAct(
        "replay",
        _("Hold deferred messages"),
        _("Hold"),
        _("Held"),
        _("They are not handled until somebody retries them, and keep later messages of their keys waiting."),
    ),
    Act.REPLAYED: BulkAct(
        "replay",
        _("Replay dead letters"),
        _("Replay"),
        _("Replayed"),
        _("Their groups handle them again, with failures counted from zero."),
    ),
    Act.DISCARDED: BulkAct(
        "discard",
        _("Discard deferred messages"),
        _("Discard"),
        _("Discarded"),
        _("This cannot be undone: discarded messages are never handled."),
    ),
}


def database_of(request: HttpRequest) -> str:
    """Return the alias of the database that the page shows, by default the first one."""
    known = deferred_databases()
    chosen = request.GET.get("database", "")
    return chosen if chosen in known else known[0]


def _kinds(request: HttpRequest) -> list[dict[str, Any]]:
    """Return the kinds of deferred messages (equal values in `COLUMNS`) with their counts, the most frequent first."""
    known: list[dict[str, Any]] | None = getattr(request, "_outbox_deferred", None)
    if known is None:
        rows = Deferred.objects.using(database_of(request)).order_by().values(*COLUMNS)
        counted = rows.annotate(count=Count("id"), first=Min("deferred_at"), last=Max("deferred_at"))
        known = list(counted.order_by("-count", *COLUMNS))
        request._outbox_deferred = known  # type: ignore[attr-defined]  # read once per request
    return known


STATE_NAMES = {
    DeferredState.DUE: _("due"),
    DeferredState.WAITING: _("waiting"),
    DeferredState.ASLEEP: _("asleep"),
    DeferredState.RUNNING: _("running"),
    DeferredState.HELD: _("held"),
    DeferredState.IN_DOUBT: _("in doubt"),
    DeferredState.NO_HANDLER: _("no handler"),
    DeferredState.DEAD: _("dead"),
}


TONES = {
    DeferredState.ASLEEP: "plain",
    DeferredState.RUNNING: "good",
    DeferredState.HELD: "bad",
    DeferredState.DEAD: "bad",
}


def _states(row: Any) -> Iterator[DeferredState]:
    """Yield the states by which the filter finds a row; only "running" if it is, since each run is in doubt until it ends."""
    if row.dead_at or row.run_by:
        yield DeferredState.DEAD if row.dead_at else DeferredState.RUNNING
        return
    due_at = row.due_at and database.aware(row.due_at)
    if due_at is None:
        yield DeferredState.ASLEEP
    elif due_at >= HELD:
        yield DeferredState.HELD
    else:
        yield DeferredState.DUE if due_at <= datetime.now(UTC) else DeferredState.WAITING
    if row.crashes:
        yield DeferredState.IN_DOUBT
    if row.no_code_since:
        yield DeferredState.NO_HANDLER


class DatabaseFilter(Filter):
    """Choose the database, if groups use several. It filters nothing, since `get_queryset` reads from the chosen database."""

    title = _("database")
    parameter_name = "database"
    is_indexed = True

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(alias, alias) for alias in deferred_databases()[1:]]  # the first one is shown without a choice

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


class DeferredStateFilter(Filter):
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Text]]:
        return [(state, STATE_NAMES[state]) for state in DeferredState]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        state = self.value()
        if state is None:
            return queryset
        return queryset.filter(STATES[DeferredState(state)]) if state in [*DeferredState] else queryset.none()


def _column_filter(name: str, label: Text) -> type[Filter]:
    """Return a filter by a column, which offers the column's most frequent values."""

    class ColumnFilter(Filter):
        title = label
        parameter_name = name
        column = FILTERS[name]

        def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
            values = list(dict.fromkeys(kind[self.column] for kind in _kinds(request) if kind[self.column]))[:VALUES_SHOWN]
            chosen = request.GET.get(name)  # is always among the choices, since Django ignores a filter without choices
            return [(value, cut(plain(value), 80)) for value in dict.fromkeys([*values, *([chosen] if chosen else [])])]

    return ColumnFilter


FILTERS = {"group": "consumer_group", "topic": "topic", "type": "type", "reason": "reason", "error": "fingerprint"}
LABELS = {"group": _("group"), "topic": _("topic"), "type": _("type"), "reason": _("reason"), "error": _("error")}


@admin.register(Deferred)
class DeferredAdmin(ReadOnlyAdmin):
    list_display = ["message", "state", "consumer_group", "topic", "shown_key", "counts", "age", "shown_error"]
    list_display_links = None
    list_filter = [
        DatabaseFilter,
        DeferredStateFilter,
        *(_column_filter(name, label) for name, label in LABELS.items()),
    ]
    search_fields = ["own_id", "key"]
    search_help_text = _("A message id or a key. Exact matches only.")
    actions = ["retry_now", "hold", "replay", "discard"]
    change_list_template = "admin/outbox/deferred/change_list.html"
    fields = ()
    is_small = True
    time = "deferred_at"
    pages = ("changelist", "change", "history")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Deferred]:
        return Deferred.objects.using(database_of(request)).defer("body", "headers")

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "replay")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "discard")

    def search(self, rows: QuerySet[Deferred], text: str) -> QuerySet[Deferred]:
        return rows.filter(Q(message_id=uuid_of(text)) | Q(own_id=text) | Q(key=text))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """List deferred messages, and above the list their counts by group, error and key."""
        if not self.has_view_permission(request):
            return super().changelist_view(request, extra_context)
        connection = database.raw(database_of(request))
        counts = [count for count in read_deferred(connection) if not count.reason]
        more = {
            "groups": [(count, age(count.late_seconds), size_in_words(count.bytes)) for count in counts],
            "kinds": [self._kind(request, kind) for kind in _kinds(request)[:KINDS_SHOWN]],
            "keys": [
                (group, topic, shown(key, 60), n) for group, topic, key, n in read_sleeping_keys(connection, limit=KEYS_SHOWN)
            ],
        }
        return super().changelist_view(request, more | (extra_context or {}))

    def _kind(self, request: HttpRequest, kind: dict[str, Any]) -> dict[str, Any]:
        chosen = {name: kind[column] for name, column in FILTERS.items() if kind[column]}
        chosen |= {"database": request.GET["database"]} if "database" in request.GET else {}
        texts = {"error": shown(kind["fingerprint"], 200), "first": moment(kind["first"]), "last": moment(kind["last"])}
        return kind | texts | {"url": f"?{urlencode(chosen)}"}

    def complete(self, request: HttpRequest, rows: list[Any]) -> None:
        runs = {
            (process.consumer_group, process.handling.message_id): _("{}, for {}").format(
                process.name, age(process.handling.seconds)
            )
            for process in read_processes(database.raw(database_of(request)))
            if process.handling and not process.is_silent
        }
        for row in rows:
            row.run_by = runs.get((row.consumer_group, row.own_id), "")
            row.url = f"{url_of(self.admin_site, 'outbox_deferred_change', row.pk)}?{urlencode({'database': row._state.db})}"

    @admin.display(description=_("message"))
    def message(self, row: Any) -> SafeString:
        return format_html('<a class="outbox-id" href="{}">{}</a>', row.url, shown(row.own_id, 40))

    @admin.display(description=_("state"))
    def state(self, row: Any) -> SafeString:
        badges = ((badge(STATE_NAMES[state], TONES.get(state, "waiting")),) for state in _states(row))
        return format_html_join(" ", "{}", [*badges, *([(row.run_by,)] if row.run_by and not row.dead_at else [])])

    @admin.display(description=_("key"))
    def shown_key(self, row: Deferred) -> SafeString:
        return shown(row.key, 60)

    @admin.display(description=_("failures, runs"))
    def counts(self, row: Deferred) -> str:
        return f"{row.failures}, {row.runs}"

    @admin.display(description=_("age"))
    def age(self, row: Deferred) -> str:
        return since(row.deferred_at)

    @admin.display(description=_("reason"))
    def shown_error(self, row: Deferred) -> SafeString:
        return format_html("{} {}", row.reason, shown(row.error, 200))

    @admin.action(description=_("Retry now"), permissions=["replay"])
    def retry_now(self, request: HttpRequest, queryset: QuerySet[Deferred]) -> HttpResponse | None:
        return self._settle(request, queryset, Act.RETRIED_NOW)

    @admin.action(description=_("Hold"), permissions=["replay"])
    def hold(self, request: HttpRequest, queryset: QuerySet[Deferred]) -> HttpResponse | None:
        return self._settle(request, queryset, Act.HELD)

    @admin.action(description=_("Replay"), permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: QuerySet[Deferred]) -> HttpResponse | None:
        return self._settle(request, queryset, Act.REPLAYED)

    @admin.action(description=_("Discard"), permissions=["discard"])
    def discard(self, request: HttpRequest, queryset: QuerySet[Deferred]) -> HttpResponse | None:
        return self._settle(request, queryset, Act.DISCARDED)

    def _settle(self, request: HttpRequest, queryset: QuerySet[Deferred], act: Act) -> HttpResponse | None:
        bulk_act, at = ACTS[act], as_of(request, queryset.db)
        chosen = queryset.filter(APPLIES[act], deferred_at__lte=at)
        chosen = chosen.filter(dead_at__lte=at) if act is Act.REPLAYED else chosen
        kinds = list(chosen.order_by().values(*COLUMNS).annotate(count=Count("id")).order_by("-count", *COLUMNS))
        counts: dict[str, int] = {}
        for kind in kinds:
            where = _("{}, group {}").format(kind["topic"], kind["consumer_group"])
            counts[where] = counts.get(where, 0) + kind["count"]
        form = reason_form(request, count=sum(counts.values()), at=at)
        if form.count and not form.is_valid():
            hidden, notes = chosen_rows(request), _kinds_in_words(kinds)
            return impact_page(
                self, request, act=bulk_act, form=form, counts=counts, hidden=hidden, limit=MAX_PER_REQUEST, notes=notes
            )
        done = self._act(request, chosen, act, form.cleaned_data["reason"]) if form.count else 0
        notify(self, request, bulk_act, done=done, wanted=form.wanted, limit=MAX_PER_REQUEST)
        return None

    def _act(self, request: HttpRequest, chosen: QuerySet[Deferred], act: Act, reason: str) -> int:
        """Carry out an act on the chosen messages, and log it; return the number of changed messages."""
        done = 0
        for portion in settle(chosen, act, by=request.user.get_username(), reason=reason, limit=MAX_PER_REQUEST):
            names = {str(row.pk): _("{} in group {}").format(row.own_id, row.consumer_group) for row in portion}
            write_log(request, self.model, names, logged(ACTS[act], reason))
            done += len(portion)
        return done

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Deferred | None:
        try:
            row: Deferred = read_beginning(self.get_queryset(request).defer(None)).get(pk=object_id)
        except (Deferred.DoesNotExist, ValueError, ValidationError):
            return None
        self.complete(request, [row])
        return row

    def get_extra_context(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        has_page = MessageRow.objects.filter(id=row.message_id).exists()
        return {
            "title": _("Deferred message {}").format(plain(row.own_id)),
            "row": row,
            "state": self.state(row),
            "key": shown(row.key),
            "error": shown(row.error),
            "run_by": row.run_by,
            "message": message_link(self.admin_site, row.message_id, short=False) if has_page else shown(row.own_id),
            **contents(request, read_headers(row.headers), row.beginning, row.size),
        }


def _kinds_in_words(kinds: Iterable[dict[str, Any]]) -> list[str]:
    """Return lines about the most frequent kinds of messages, with their errors."""
    lines = [
        _("{count} of group {consumer_group}: {reason} {error}")
        .format(**kind, error=cut(plain(kind["fingerprint"]), 300))
        .strip()
        for kind in kinds
    ]
    more = len(lines) - KINDS_ON_CONFIRMATION
    return lines[:KINDS_ON_CONFIRMATION] + ([_("and {} more kinds").format(more)] if more > 0 else [])

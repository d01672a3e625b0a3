"""Dead messages: rejected by a broker, until an operator replays or discards them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db import router
from django.db.models import BooleanField, Count, QuerySet
from django.db.models.expressions import RawSQL
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox import database
from outbox.admin.base import ReadOnlyAdmin, TopicFilter
from outbox.admin.contents import contents, read_beginning
from outbox.admin.impact import BulkAct, as_of, chosen_rows, impact_page, logged, notify, reason_form, write_log
from outbox.admin.links import message_link
from outbox.admin.lists import Filter
from outbox.admin.text import Text, badge, shown, since
from outbox.batches.operators import replay_messages
from outbox.database import guarded
from outbox.message import read_headers
from outbox.models import DeadMessage

MAX_PER_REQUEST = 10_000
CHUNK = 500  # messages in one transaction, with their log entries

# Whether the message of a row is still dead: it is in a dead batch, and was not split off from it. A message that an operator has
# replayed or discarded is settled, and keeps its row.
IS_DEAD = """
EXISTS (SELECT FROM outbox_batch b WHERE b.id = outbox_dead.batch_id AND b.state = 4
    AND array_position(b.message_ids, outbox_dead.message_id)::smallint <> ALL(b.split))
"""

REPLAY = BulkAct(
    "replay",
    _("Replay dead messages"),
    _("Replay"),
    _("Released, to be sent again"),
    _("A relay sends them again, with failures counted from zero."),
)
DISCARD = BulkAct(
    "discard",
    _("Discard dead messages"),
    _("Discard"),
    _("Discarded"),
    _("This cannot be undone: discarded messages are never sent again."),
)


class SettledFilter(Filter):
    """Filter by state. By default, only messages that are still dead are listed."""

    title = _("state")
    parameter_name = "settled"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Text]]:
        return [("yes", _("settled")), ("all", _("all"))]

    def choices(self, changelist: Any) -> Any:
        first, *others = super().choices(changelist)
        yield {**first, "display": _("dead")}
        yield from others

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() is None:
            return queryset.filter(is_dead=True)
        return queryset.filter(is_dead=False) if self.value() == "yes" else queryset


@admin.register(DeadMessage)
class DeadMessageAdmin(ReadOnlyAdmin):
    list_display = ["message", "state", "topic", "shown_key", "died", "shown_reason"]
    list_filter = [SettledFilter, TopicFilter]
    search_fields = ["message_id", "key"]
    search_help_text = _("A message id or a key. Exact matches only.")
    actions = ["replay", "discard"]
    fields = ()
    keyset = "message_id"
    is_small = True
    time = "died_at"
    pages = ("changelist", "change", "history")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        is_dead = RawSQL(IS_DEAD, [], output_field=BooleanField())  # noqa: S611  (no value in it)
        rows: QuerySet[Any] = super().get_queryset(request)
        rows = rows.defer("body", "headers").annotate(is_dead=is_dead)
        return rows

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "replay")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "discard")

    def search(self, rows: QuerySet[DeadMessage], text: str) -> QuerySet[DeadMessage]:
        try:
            return rows.filter(message_id=UUID(text))
        except ValueError:
            return rows.filter(key=text)

    @admin.display(description=_("message"))
    def message(self, row: DeadMessage) -> str:
        return f"{str(row.pk)[:13]}…{str(row.pk)[-6:]}"

    @admin.display(description=_("state"))
    def state(self, row: Any) -> SafeString:
        return badge(_("dead"), "bad") if row.is_dead else badge(_("settled"), "plain")

    @admin.display(description=_("key"))
    def shown_key(self, row: DeadMessage) -> SafeString:
        return shown(row.key, 60)

    @admin.display(description=_("died"))
    def died(self, row: DeadMessage) -> str:
        return _("%(age)s ago") % {"age": since(row.died_at)}

    @admin.display(description=_("reason"))
    def shown_reason(self, row: DeadMessage) -> SafeString:
        return shown(row.reason, 200)

    @admin.action(description=_("Replay"), permissions=["replay"])
    def replay(self, request: HttpRequest, queryset: QuerySet[DeadMessage]) -> HttpResponse | None:
        return self._settle(request, queryset, REPLAY)

    @admin.action(description=_("Discard"), permissions=["discard"])
    def discard(self, request: HttpRequest, queryset: QuerySet[DeadMessage]) -> HttpResponse | None:
        return self._settle(request, queryset, DISCARD)

    def _settle(self, request: HttpRequest, queryset: QuerySet[Any], act: BulkAct) -> HttpResponse | None:
        at = as_of(request, queryset.db)
        chosen = queryset.filter(is_dead=True, died_at__lte=at)
        counts = dict(chosen.order_by("topic").values_list("topic").annotate(count=Count("pk")))
        form = reason_form(request, count=sum(counts.values()), at=at)
        if form.count and not form.is_valid():
            return impact_page(
                self, request, act=act, form=form, counts=counts, hidden=chosen_rows(request), limit=MAX_PER_REQUEST
            )
        done = self._act(request, chosen, act, form.cleaned_data["reason"]) if form.count else 0
        notify(self, request, act, done=done, wanted=form.wanted, limit=MAX_PER_REQUEST)
        return None

    def _act(self, request: HttpRequest, chosen: QuerySet[DeadMessage], act: BulkAct, reason: str) -> int:
        """Settle the chosen messages, each chunk in one transaction with its log entries; return the number of settled ones."""
        using = router.db_for_write(self.model)
        ids = list(chosen.order_by("message_id").values_list("message_id", flat=True)[:MAX_PER_REQUEST])
        done = 0
        for start in range(0, len(ids), CHUNK):
            with guarded.atomic(using):
                chunk_ids = ids[start : start + CHUNK]
                by = request.user.get_username()
                settled = replay_messages(database.raw(using), chunk_ids, by=by, reason=reason, discard=act is DISCARD)
                names = {str(message_id): str(message_id) for message_id in chunk_ids if str(message_id) not in settled.refused}
                write_log(request, self.model, names, logged(act, reason))
                done += settled.messages
            for message_id, why in list(settled.refused.items())[:10]:
                self.message_user(request, _("{} was not changed: {}").format(message_id, why), messages.WARNING)
        return done

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> DeadMessage | None:
        try:
            row: DeadMessage = read_beginning(self.get_queryset(request).defer(None)).get(pk=UUID(object_id))
        except (DeadMessage.DoesNotExist, ValueError, ValidationError):
            return None
        return row

    def get_extra_context(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        return {
            "title": _("Dead message {}").format(row.pk),
            "row": row,
            "state": self.state(row),
            "key": shown(row.key),
            "reason": shown(row.reason),
            "message": message_link(self.admin_site, row.pk, short=False),
            **contents(request, read_headers(row.headers), row.beginning, row.size),
        }

"""The admin page of the embedded broker's half messages: their age and check-backs, and an action that checks back now."""

from __future__ import annotations

from contextlib import closing
from typing import Any, cast

from django.contrib import admin, messages
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox import conf
from outbox.admin.base import ReadOnlyAdmin
from outbox.admin.impact import write_log
from outbox.admin.links import message_link
from outbox.admin.lists import Filter
from outbox.admin.open_transactions import transaction_cell
from outbox.admin.pages import may_see
from outbox.admin.text import Text, badge, moment, plain, shown, since
from outbox.check_backs.ask import in_process
from outbox.embedded import EmbeddedBroker
from outbox.embedded.half_state import HalfState
from outbox.embedded.models import EmbeddedHalf, EmbeddedTopic
from outbox.errors import BrokerUnavailable
from outbox.models import MessageRow
from outbox.monitoring.open_transactions import read_open_transactions

TONES = {HalfState.UNDECIDED: "waiting", HalfState.PARKED: "bad"}


class UnresolvedFilter(Filter):
    """Filters by state; by default, half messages that are not ended, which partial indexes find."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Text]]:
        return [(state.name.lower(), state.label) for state in HalfState]

    @property
    def is_indexed(self) -> bool:  # type: ignore[override]
        return self.value() in ("undecided", "parked")

    def choices(self, changelist: Any) -> Any:
        first, *others = super().choices(changelist)
        yield {**first, "display": _("unresolved")}
        yield from others

    def queryset(self, request: HttpRequest, queryset: QuerySet[EmbeddedHalf]) -> QuerySet[EmbeddedHalf]:
        if self.value() is None:
            return queryset.filter(Q(state=HalfState.UNDECIDED) | Q(state=HalfState.PARKED))
        return queryset.filter(state__in=[state for state in HalfState if state.name.lower() == self.value()])


@admin.register(EmbeddedHalf)
class HalfAdmin(ReadOnlyAdmin):
    list_display = ["id", "shown_state", "topic", "message", "shown_key", "age", "asks", "next_ask", "transaction"]
    list_display_links = None
    list_filter = [UnresolvedFilter]
    time = "born_at"
    actions = ["ask"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[EmbeddedHalf]:
        broker = _broker()
        halves = super().get_queryset(request).defer("body", "headers")
        return halves.using(_database_of(broker)) if broker else halves.none()

    def has_ask_permission(self, request: HttpRequest) -> bool:
        return self.may(request, "ask")

    def complete(self, request: HttpRequest, rows: list[Any]) -> None:
        names = dict(EmbeddedTopic.objects.using(rows[0]._state.db).values_list("id", "name")) if rows else {}
        for row in rows:
            row.topic_name = names.get(row.topic_id, "")
        open_transactions = read_open_transactions((row.message_id, row.token) for row in rows if row.state in TONES)
        with_query = may_see(self.admin_site, MessageRow, request)
        for row in rows:
            row.transaction = transaction_cell(open_transactions.get(row.message_id, ""), with_query=with_query)

    @admin.display(description=_("state"))
    def shown_state(self, row: EmbeddedHalf) -> SafeString:
        return badge(row.get_state_display(), TONES.get(HalfState(row.state), "plain"))

    @admin.display(description=_("topic"))
    def topic(self, row: Any) -> str:
        return str(row.topic_name)

    @admin.display(description=_("message"))
    def message(self, row: EmbeddedHalf) -> SafeString:
        return message_link(self.admin_site, row.message_id)

    @admin.display(description=_("key"))
    def shown_key(self, row: EmbeddedHalf) -> SafeString:
        return shown(row.key, 60)

    @admin.display(description=_("age"))
    def age(self, row: EmbeddedHalf) -> str:
        return since(row.born_at)

    @admin.display(description=_("asks"))
    def asks(self, row: EmbeddedHalf) -> str:
        return f"{row.asked}"

    @admin.display(description=_("next ask"))
    def next_ask(self, row: EmbeddedHalf) -> SafeString:
        return moment(row.ask_at if row.state == HalfState.UNDECIDED else None)

    @admin.display(description=_("transaction"))
    def transaction(self, row: Any) -> SafeString:
        """Return the transaction that a check-back waits for."""
        cell: SafeString = row.transaction
        return cell

    @admin.action(description=_("Check back now"), permissions=["ask"])
    def ask(self, request: HttpRequest, queryset: QuerySet[EmbeddedHalf]) -> None:
        """Check back about each half message in this process, end it as answered, and record the act in the admin's log."""
        alias = _broker()
        chosen = list(queryset.order_by("id").values_list("id", "message_id")[: self.list_per_page])
        if alias is None or not chosen:
            self.message_user(request, _("No check-back was needed: they have ended."), messages.WARNING)
            return
        ask = in_process(_database_of(alias), asked_by="admin")
        try:
            with closing(conf.make_broker(alias)) as broker:
                for half_id, message_id in chosen:
                    answer = cast("EmbeddedBroker", broker).check_half(ask, str(half_id))
                    result = str(answer or _("it had ended before"))
                    text = _("Half message {} of message {}: {}.").format(half_id, plain(message_id), result)
                    self.message_user(request, text)
                    write_log(
                        request,
                        self.model,
                        {str(half_id): _("half message {}").format(half_id)},
                        _("Checked back: {}.").format(result),
                    )
        except BrokerUnavailable as error:
            self.message_user(request, _("The broker cannot be reached: {}").format(error), messages.ERROR)


def _broker() -> str | None:
    """Return the alias of the first embedded broker; None if the project has none."""
    brokers = conf.settings().brokers
    return next((alias for alias in sorted(brokers) if issubclass(conf.broker_class(alias), EmbeddedBroker)), None)


def _database_of(alias: str) -> str:
    return conf.database_of_broker(alias)

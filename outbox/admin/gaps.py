"""
Gaps: ranges of numbers that have not reached a group, the messages with these numbers, and the act that delivers them again.

A relay numbers the messages of a topic in each lane without gaps. So a missing number is a message that a group has not received.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox.admin.base import ReadOnlyAdmin, TopicFilter
from outbox.admin.deferred import DatabaseFilter, database_of
from outbox.admin.impact import BulkAct, as_of, chosen_rows, impact_page, logged, notify, reason_form, write_log
from outbox.admin.inbox import GroupFilter
from outbox.admin.links import message_link
from outbox.admin.lists import Filter
from outbox.admin.pages import url_of
from outbox.admin.text import Text, badge, moment, shown
from outbox.deliver_again import Undelivered, deliver_again, lost
from outbox.models import Gap

DELIVER = BulkAct(
    "deliver",
    _("Deliver lost messages again"),
    _("Deliver again"),
    _("Delivered again"),
    _(
        "They become deferred messages of the groups that lost them, and are handled at once; on an ordered topic, after later "
        "ones of their keys."
    ),
)


class GapStateFilter(Filter):
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Text]]:
        return [("open", _("open")), ("closed", _("closed"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Gap]) -> QuerySet[Gap]:
        match self.value():
            case None:
                return queryset
            case "open" | "closed":
                return queryset.filter(closed_at__isnull=self.value() == "open")
        return queryset.none()


@admin.register(Gap)
class GapAdmin(ReadOnlyAdmin):
    list_display = ["gap", "state", "consumer_group", "topic", "messages", "found"]
    list_display_links = None
    list_filter = [DatabaseFilter, GapStateFilter, GroupFilter, TopicFilter]
    actions = ["deliver"]
    change_form_template = "admin/outbox/gap/change_form.html"
    fields = ()
    is_small = True
    time = "found_at"
    pages = ("changelist", "change", "history")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Gap]:
        return Gap.objects.using(database_of(request))

    def has_deliver_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("outbox.replay_deferred"))

    @admin.display(description=_("gap"))
    def gap(self, row: Gap) -> SafeString:
        url = f"{url_of(self.admin_site, 'outbox_gap_change', row.pk)}?{urlencode({'database': row._state.db})}"
        text = _("lane {}, {} to {}").format(row.lane, row.first_number, row.last_number)
        return format_html('<a href="{}">{}</a>', url, text)

    @admin.display(description=_("state"))
    def state(self, row: Gap) -> SafeString:
        return badge(_("closed"), "plain") if row.closed_at else badge(_("open"), "bad")

    @admin.display(description=_("messages"))
    def messages(self, row: Gap) -> int:
        return row.last_number - row.first_number + 1

    @admin.display(description=_("found"))
    def found(self, row: Gap) -> SafeString:
        return moment(row.found_at)

    @admin.action(description=_("Deliver lost messages again"), permissions=["deliver"])
    def deliver(self, request: HttpRequest, queryset: QuerySet[Gap]) -> HttpResponse | None:
        """Ask for a confirmation and a reason, then deliver the messages that can be delivered."""
        at = as_of(request, queryset.db)
        gaps = list(queryset.filter(closed_at=None, found_at__lte=at))
        rows = [row for row in lost(queryset.db) if any(_has(gap, row) for gap in gaps)]
        counts, refused = Counter[str](), Counter[str]()
        for row in rows:
            (refused if row.refused else counts)[row.refused or _("{}, group {}").format(row.topic, row.group)] += row.messages
        form = reason_form(request, count=counts.total(), at=at)
        if form.count and not form.is_valid():
            notes = [_("Not delivered: {}. {}").format(number, why) for why, number in refused.items()]
            hidden = chosen_rows(request)
            return impact_page(self, request, act=DELIVER, form=form, counts=counts, hidden=hidden, limit=form.count, notes=notes)
        done = 0
        if form.count:
            reason = form.cleaned_data["reason"]
            done = deliver_again(rows, by=request.user.get_username(), reason=reason)
            write_log(request, Gap, {str(gap.pk): str(gap) for gap in gaps}, logged(DELIVER, reason, done))
        notify(self, request, DELIVER, done=done, wanted=form.wanted, limit=form.count)
        return None

    def get_extra_context(self, request: HttpRequest, row: Gap) -> dict[str, Any]:
        rows = [undelivered for undelivered in lost(row._state.db or "default") if _has(row, undelivered)]
        listed = [
            {
                "number": undelivered.number,
                "message": message_link(self.admin_site, undelivered.message_id)
                if undelivered.message_id
                else _("{} unknown").format(undelivered.messages),
                "type": shown(undelivered.type),
                "refused": undelivered.refused,
            }
            for undelivered in rows
        ]
        return {"title": _("Gap of group {}").format(row.consumer_group), "row": row, "state": self.state(row), "listed": listed}


def _has(gap: Gap, row: Undelivered) -> bool:
    """Return whether the number of a message is in a gap."""
    is_same_lane = (gap.consumer_group, gap.topic, gap.lane) == (row.group, row.topic, row.lane)
    return is_same_lane and gap.first_number <= (row.number or 0) <= gap.last_number

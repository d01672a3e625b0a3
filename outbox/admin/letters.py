"""Dead letters: given up by a consumer group, listed by its broker, until an operator replays or discards them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from outbox.admin.base import ReadOnlyAdmin
from outbox.admin.impact import BulkAct, as_of, impact_page, notify, reason_form, write_log
from outbox.admin.letter_filter import LetterFilter
from outbox.admin.links import message_link
from outbox.admin.pages import frame
from outbox.admin.text import plain, shown, since
from outbox.consuming.dead_letters import READ_AT_ONCE, Letter, group_letters, read_letters, settle_letters
from outbox.errors import BrokerUnavailable
from outbox.logs import cut
from outbox.models import DeadLetter, MessageRow

PER_PAGE = 100
KINDS_NAMED = 5  # on the page before an act

REPLAY = BulkAct(
    "replay",
    "Replay dead letters",
    "Replay",
    "To be delivered again",
    "Their groups receive them again, with deliveries counted from 1.",
)
DISCARD = BulkAct(
    "discard",
    "Discard dead letters",
    "Discard",
    "Discarded",
    "This cannot be undone: discarded messages are never delivered again.",
)
ACTS = {act.name: act for act in (REPLAY, DISCARD)}


def _in_no_transaction(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Exempt a view from ATOMIC_REQUESTS: the record of an act, written before it, must not be rolled back after it."""
    for alias in settings.DATABASES:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


@admin.register(DeadLetter)
class DeadLetterAdmin(ReadOnlyAdmin):
    @_in_no_transaction
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show dead letters, grouped by similar errors, or act on some of them."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        try:
            asked = LetterFilter.of(request)
        except IncorrectLookupParameters:
            return HttpResponseRedirect(request.path)
        letters = read_letters()
        matching = [one for one in letters.found if asked.takes(one)]
        if request.method == "POST" and (answer := self._act(request, matching)):
            return answer
        page = Paginator(matching, PER_PAGE).get_page(request.GET.get("p"))
        context = {
            **self.admin_site.each_context(request),
            **frame(self.admin_site, request),
            "title": "Dead letters",
            "opts": self.opts,
            "media": self.media,
            "rows": self._rows(list(page.object_list)),
            "page": page,
            "count": len(matching),
            "kinds": asked.kinds(matching),
            "troubles": [shown(trouble) for trouble in letters.troubles],
            "cut": letters.cut,
            "read_at_once": READ_AT_ONCE,
            "groups": sorted({one.letter.group for one in letters.found}),
            "topics": sorted({one.letter.topic for one in letters.found}),
            "asked": asked,
            "acts": [act for act in ACTS.values() if self.may(request, act.name)],
        }
        return TemplateResponse(request, "admin/outbox/deadletter/change_list.html", context)

    def _act(self, request: HttpRequest, matching: list[Letter]) -> HttpResponse | None:
        """Ask for the reason, or settle the chosen letters; return None where there is nothing to do."""
        act = ACTS.get(request.POST.get("action", ""))
        if act is None:
            return None
        if not self.may(request, act.name):
            raise PermissionDenied
        at = as_of(request)
        names, is_all = set(request.POST.getlist("letter")), request.POST.get("all") == "1"
        chosen = [one for one in matching if one.letter.died_at <= at and (is_all or one.name in names)]
        if not chosen and not names and not is_all:
            self.message_user(request, "Choose some dead letters first.", messages.WARNING)
            return HttpResponseRedirect(request.get_full_path())
        form = reason_form(request, count=len(chosen), at=at)
        if chosen and not form.is_valid():
            counts = Counter(f"{one.letter.topic}, group {one.letter.group}" for one in chosen)
            hidden = [("action", act.name), *([("all", "1")] if is_all else [("letter", one.name) for one in chosen])]
            notes = _kinds_named(chosen)
            return impact_page(self, request, act=act, form=form, counts=counts, hidden=hidden, limit=len(chosen), notes=notes)
        done = self._settle(request, chosen, act, form.cleaned_data["reason"]) if chosen else 0
        notify(self, request, act, done=done, wanted=max(form.wanted, len(names)), limit=READ_AT_ONCE)
        return HttpResponseRedirect(request.get_full_path())

    def _settle(self, request: HttpRequest, chosen: list[Letter], act: BulkAct, reason: str) -> int:
        """Settle the chosen letters that still exist, and log it; return their number."""
        done: dict[str, str] = {}
        by = request.user.get_username()
        try:
            for one in settle_letters(chosen, by=by, reason=reason, discard=act is DISCARD):
                done[one.name] = f"{one.letter.message_id} in group {one.letter.group}"
        except BrokerUnavailable as error:
            self.message_user(request, f"The broker cannot be reached: {error}", messages.ERROR)
        finally:
            write_log(request, self.model, done, f"{act.past}. Reason: {reason}")
        return len(done)

    def _rows(self, letters: list[Letter]) -> list[dict[str, Any]]:
        ours = MessageRow.objects.filter(id__in=[number for one in letters if (number := _uuid(one.letter.message_id))])
        known = {str(number) for number in ours.values_list("id", flat=True)}
        return [
            {
                "name": one.name,
                "group": one.letter.group,
                "topic": one.letter.topic,
                "message": message_link(self.admin_site, one.letter.message_id)
                if one.letter.message_id in known
                else shown(one.letter.message_id, 60),
                "delivery_count": one.letter.delivery_count,
                "died": since(one.letter.died_at),
                "died_at": one.letter.died_at,
                "reason": shown(one.letter.reason),
            }
            for one in letters
        ]


def _kinds_named(chosen: list[Letter]) -> list[str]:
    """Return the most frequent errors with their number of letters."""
    kinds = group_letters(chosen)
    named = [f"{one.count} of group {one.group}: {cut(plain(one.reason), 300)}" for one in kinds[:KINDS_NAMED]]
    return named + ([f"and {len(kinds) - KINDS_NAMED} more kinds of errors"] if len(kinds) > KINDS_NAMED else [])


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None

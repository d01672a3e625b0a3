"""Dead letters: what consumer groups gave up, as their brokers list it; delivered again or discarded by a person."""

from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from outbox.admin.base import ReadOnlyAdmin
from outbox.admin.impact import Act, as_of, impact_page, reason_form, tell, write_log
from outbox.admin.links import message_link
from outbox.admin.pages import frame
from outbox.admin.text import shown, since
from outbox.consuming.dead_letters import READ_AT_ONCE, Letter, read_letters, settle_letters
from outbox.errors import BrokerUnavailable
from outbox.models import DeadLetter, MessageRow

RETRY = Act(
    "retry",
    "Deliver dead letters again",
    "Deliver again",
    "To be delivered again",
    "Their groups get them, from the first attempt.",
)
DISCARD = Act(
    "discard", "Discard dead letters", "Discard", "Discarded", "They are gone for good; their groups never handle them."
)
ACTS = {act.name: act for act in (RETRY, DISCARD)}


@admin.register(DeadLetter)
class DeadLetterAdmin(ReadOnlyAdmin):
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show dead letters, those of one group or topic, or act on some of them."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        group, topic = request.GET.get("group", ""), request.GET.get("topic", "")
        letters = read_letters()
        matching = [one for one in letters.found if group in ("", one.letter.group) and topic in ("", one.letter.topic)]
        if request.method == "POST" and (answer := self._act(request, matching)):
            return answer
        context = {
            **self.admin_site.each_context(request),
            **frame(self.admin_site, request),
            "title": "Dead letters",
            "opts": self.opts,
            "media": self.media,
            "rows": self._rows(matching),
            "troubles": [shown(trouble) for trouble in letters.troubles],
            "cut": letters.cut,
            "read_at_once": READ_AT_ONCE,
            "groups": sorted({one.letter.group for one in letters.found}),
            "topics": sorted({one.letter.topic for one in letters.found}),
            "group": group,
            "topic": topic,
            "acts": [act for act in ACTS.values() if self.may(request, act.name)],
        }
        return TemplateResponse(request, "admin/outbox/deadletter/change_list.html", context)

    def _act(self, request: HttpRequest, matching: list[Letter]) -> HttpResponse | None:
        """Ask for the reason, or settle what was chosen; None: there is nothing to do."""
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
            return impact_page(self, request, act=act, form=form, counts=counts, hidden=hidden, limit=len(chosen))
        done = self._settle(request, chosen, act, form.cleaned_data["reason"]) if chosen else 0
        tell(self, request, act, done=done, wanted=max(form.wanted, len(names)), limit=READ_AT_ONCE)
        return HttpResponseRedirect(request.get_full_path())

    def _settle(self, request: HttpRequest, chosen: list[Letter], act: Act, reason: str) -> int:
        """Settle what was chosen and note it, each letter that was still there; give how many."""
        by_name = {one.name: one.letter for one in chosen}
        done: dict[str, str] = {}
        try:
            for name in settle_letters(by_name, discard=act is DISCARD):
                done[name] = f"{by_name[name].message_id} in group {by_name[name].group}"
        except BrokerUnavailable as error:
            self.message_user(request, f"The broker is out of reach: {error}", messages.ERROR)
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
                "attempt": one.letter.attempt,
                "died": since(one.letter.died_at),
                "reason": shown(one.letter.reason, 300),
            }
            for one in letters
        ]


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None

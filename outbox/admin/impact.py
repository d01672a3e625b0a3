"""The confirmation page of an act: how many rows it affects, and a form for the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec
from django import forms
from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.db.models import Model
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy as _

from outbox.admin.pages import frame
from outbox.admin.text import Text, plain

TYPED_OVER = 100  # to change more rows than this, the user has to type their number


class BulkAct(msgspec.Struct, frozen=True):
    """
    An action on many rows.

    Args:
        name: the permission, also the name in forms: "replay", "discard".
        title: the title of the page, such as "Replay dead messages".
        button: the label of the button, such as "Replay".
        past: the words for the finished act in the log and in messages, such as "Replayed".
        warning: a sentence about the consequences for the rows.
    """

    name: str
    title: Text
    button: Text
    past: Text
    warning: Text


class ReasonForm(forms.Form):
    """The form for the reason of an act. If many rows are affected, the user also has to type their number."""

    reason = forms.CharField(label=_("Reason"), max_length=500, help_text=_("For the log: why you do this."))
    typed = forms.CharField(max_length=20, required=False)
    as_of = forms.DateTimeField(widget=forms.HiddenInput)  # when the user saw the page; rows that came later are not affected
    shown = forms.IntegerField(widget=forms.HiddenInput)  # the number of rows that the user saw

    def __init__(self, *args: Any, count: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = count
        if count <= TYPED_OVER:
            del self.fields["typed"]
        else:
            self.fields["typed"].label = _("Type {} to confirm").format(count)

    @property
    def wanted(self) -> int:
        """The number of rows that the user wanted to change: the number shown on the form, or the current one if it is larger."""
        seen = self.cleaned_data.get("shown") if self.is_bound and self.is_valid() else None
        return max(seen or 0, self.count)

    def clean_typed(self) -> str:
        typed = str(self.cleaned_data["typed"]).strip()
        if typed != str(self.count):
            raise forms.ValidationError(_("There are {}. Type that number.").format(self.count))
        return typed


def as_of(request: HttpRequest, using: str) -> datetime:
    """Return the time at which the user saw the number of rows; on the first page, the current time of their database."""
    field = forms.DateTimeField(required=False)
    with suppress(forms.ValidationError):
        seen_at: datetime | None = field.clean(request.POST.get("as_of", ""))
        if seen_at:
            return seen_at
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        now: datetime = cursor.fetchone()[0]
    return now


def reason_form(request: HttpRequest, *, count: int, at: datetime) -> ReasonForm:
    """Return the form, bound if the user has submitted it."""
    if "reason" in request.POST:
        return ReasonForm(request.POST, count=count)
    return ReasonForm(initial={"as_of": at.isoformat(), "shown": count}, count=count)


def impact_page(
    model_admin: ModelAdmin,
    request: HttpRequest,
    *,
    act: BulkAct,
    form: ReasonForm,
    counts: Mapping[str, int],
    hidden: Sequence[tuple[str, str]],
    limit: int,
    notes: Sequence[str] = (),
) -> TemplateResponse:
    """
    Show the number of messages that an act affects, and ask for confirmation.

    Args:
        counts: the number of messages by topic.
        hidden: parameters of the chosen rows, which the form sends again.
        limit: the maximum number of rows that one request changes.
        notes: further lines, such as the kinds of messages, or why the act leaves some of them out.
    """
    context = {
        **model_admin.admin_site.each_context(request),
        **frame(model_admin.admin_site, request),
        "title": act.title,
        "act": act,
        "form": form,
        "counts": counts.items(),
        "count": form.count,
        "limit": limit,
        "hidden": hidden,
        "notes": notes,
        "opts": model_admin.opts,
        "media": model_admin.media,
    }
    return TemplateResponse(request, "admin/outbox/impact.html", context)


def notify(model_admin: ModelAdmin, request: HttpRequest, act: BulkAct, *, done: int, wanted: int, limit: int) -> None:
    """Show messages about the number of changed rows, and about rows that were not changed."""
    if done:
        model_admin.message_user(request, f"{act.past}: {done}.", messages.SUCCESS)
    if done == limit < wanted:
        model_admin.message_user(request, _("{} are left. Repeat the action for these.").format(wanted - done), messages.WARNING)
    elif done < wanted:
        text = _("{} were not changed: another user or command has settled them, or they are being handled.")
        model_admin.message_user(request, text.format(wanted - done), messages.WARNING)
    elif not wanted:
        model_admin.message_user(request, _("Nothing was changed: none of them is in that state any more."), messages.WARNING)


def logged(act: BulkAct, reason: str, done: int | None = None) -> str:
    """Return the text of an act for the log; `done` is the number of rows, if one log entry is about several."""
    return _("{}. Reason: {}").format(act.past if done is None else f"{act.past}: {done}", reason)


def write_log(request: HttpRequest, model: type[Model], names: Mapping[str, str], text: str) -> None:
    """Write an act into the admin's log, once for each object. `names`: object id -> its text in the log."""
    kind = ContentType.objects.get_for_model(model, for_concrete_model=False)
    LogEntry.objects.bulk_create(
        LogEntry(
            user_id=request.user.pk or 0,
            content_type=kind,
            object_id=object_id,
            object_repr=plain(name)[:200],
            action_flag=CHANGE,
            change_message=text,
        )
        for object_id, name in names.items()
    )


def chosen_rows(request: HttpRequest) -> list[tuple[str, str]]:
    """Return the parameters that the list sent for the action: its name, and the chosen rows."""
    names = ("action", "select_across", ACTION_CHECKBOX_NAME)
    return [(name, value) for name in names for value in request.POST.getlist(name)]

"""The list of topics, on which users pause and resume them, and the pages of the overview and the catalogue."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Model
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from outbox import database
from outbox.admin.base import ReadOnlyAdmin
from outbox.admin.catalogue import catalogue
from outbox.admin.impact import write_log
from outbox.admin.overview import overview
from outbox.admin.pages import CATALOGUE, frame, url_of
from outbox.admin.text import Text, badge, shown, since
from outbox.database import guarded
from outbox.models import Overview, Topic
from outbox.topics import pause, resume


class PauseForm(forms.Form):
    """The form for the reason of a pause, or of its end. `since` identifies the pause that the user saw."""

    reason = forms.CharField(label=_("Reason"), max_length=500, help_text=_("For the log, and for other operators."))
    since = forms.CharField(required=False, widget=forms.HiddenInput)


@admin.register(Overview)
class OverviewAdmin(ReadOnlyAdmin):
    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return bool(request.user.has_perm("outbox.view_topic"))

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the overview instead of a list."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return overview(self, request)

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("catalogue/", wrap(self.catalogue_view), name=CATALOGUE),
            *super().get_urls(),
        ]

    def catalogue_view(self, request: HttpRequest) -> HttpResponse:
        """Show the messages that this project sends, and their handlers."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return catalogue(self, request)


@admin.register(Topic)
class TopicAdmin(ReadOnlyAdmin):
    list_display_links = None
    pages = ("changelist", "history")

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("<int:topic_id>/pause/", wrap(self.pause_view), name="outbox_topic_pause"),
            path("<int:topic_id>/resume/", wrap(self.resume_view), name="outbox_topic_resume"),
            *super().get_urls(),
        ]

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        return ["name", "broker", "type", "state", "who", "why", *(["act"] if self.may(request, "pause") else []), "history"]

    @admin.display(description=_("state"))
    def state(self, row: Topic) -> SafeString:
        return badge(_("open"), "good") if not row.paused else badge(_("paused for {}").format(since(row.paused_at)), "waiting")

    @admin.display(description=_("who"))
    def who(self, row: Topic) -> SafeString:
        return shown(row.paused_by, 100)

    @admin.display(description=_("why"))
    def why(self, row: Topic) -> SafeString:
        return shown(row.pause_reason, 200)

    @admin.display(description="")
    def act(self, row: Topic) -> SafeString:
        url = url_of(self.admin_site, f"outbox_topic_{'resume' if row.paused else 'pause'}", row.pk)
        text = _("Resume {}") if row.paused else _("Pause {}")
        return format_html('<a href="{}">{}</a>', url, text.format(row.name))

    @admin.display(description=_("history"))
    def history(self, row: Topic) -> SafeString:
        url = url_of(self.admin_site, "outbox_topic_history", row.pk)
        return format_html('<a href="{}">{}</a>', url, _("History"))

    def pause_view(self, request: HttpRequest, topic_id: int) -> HttpResponse:
        """Show a form for the reason, then pause the topic."""
        topic = self._topic(request, topic_id)
        form = PauseForm(request.POST if request.method == "POST" else None)
        if not form.is_valid():
            return self._ask(request, topic, form, _("Pause {}").format(topic.name))
        with guarded.atomic(router.db_for_write(Topic)):
            reason = form.cleaned_data["reason"]
            done = pause(self._connection(), topic.name, by=request.user.get_username(), reason=reason)
            if done:
                write_log(request, Topic, {str(topic.pk): topic.name}, _("Paused. Reason: {}").format(reason))
        return self._back(request, topic, _("Topic {} is paused.") if done else _("Topic {} was paused already."), done)

    def resume_view(self, request: HttpRequest, topic_id: int) -> HttpResponse:
        """Show a form for the reason, then end the pause that the user saw."""
        topic = self._topic(request, topic_id)
        shown_since = database.aware(topic.paused_at).isoformat() if topic.paused_at else ""
        form = PauseForm(request.POST if request.method == "POST" else None, initial={"since": shown_since})
        if not form.is_valid():
            return self._ask(request, topic, form, _("Resume {}").format(topic.name))
        with guarded.atomic(router.db_for_write(Topic)):
            done = resume(self._connection(), topic.name, since=_time(form.cleaned_data["since"]))
            if done:
                write_log(
                    request, Topic, {str(topic.pk): topic.name}, _("Resumed. Reason: {}").format(form.cleaned_data["reason"])
                )
        stale = _("Topic {} was not changed: that pause has ended, or another one has begun. Reload the page.")
        return self._back(request, topic, _("Topic {} is resumed.") if done else stale, done)

    def _topic(self, request: HttpRequest, topic_id: int) -> Topic:
        if not (self.has_view_permission(request) and self.may(request, "pause")):
            raise PermissionDenied
        topic: Topic | None = self.get_queryset(request).filter(id=topic_id).first()
        if topic is None:
            raise Http404
        return topic

    def _ask(self, request: HttpRequest, topic: Topic, form: PauseForm, title: str) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            **frame(self.admin_site, request),
            "title": title,
            "opts": self.opts,
            "media": self.media,
            "topic": topic,
            "who": shown(topic.paused_by),
            "why": shown(topic.pause_reason),
            "form": form,
            "is_pause": not topic.paused,
        }
        return TemplateResponse(request, "admin/outbox/topic/pause.html", context)

    def _back(self, request: HttpRequest, topic: Topic, text: Text, done: bool) -> HttpResponse:
        self.message_user(request, text.format(topic.name), messages.SUCCESS if done else messages.WARNING)
        return HttpResponseRedirect(url_of(self.admin_site, "outbox_topic_changelist"))

    def _connection(self) -> database.Connection:
        return database.raw(router.db_for_write(Topic))


def _time(text: str) -> datetime | None:
    try:
        return parse_datetime(text)
    except ValueError:
        return None
